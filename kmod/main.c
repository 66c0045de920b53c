// SPDX-License-Identifier: GPL-2.0
/*
 * napi_macvlan: devices that share a NIC by MAC address, each with a queue and
 * a NAPI instance of its own instead of the CPU's shared backlog.
 * docs/kmod.md of vsrtune says what for and how to use it.
 */
#include <linux/module.h>
#include "nmv.h"
#include "nmv_compat.h"

static int __init nmv_init(void)
{
	int err;

	err = nmv_selftest();
	if (err)
		return err;
	err = nmv_tap_register();
	if (err)
		return err;
	err = register_netdevice_notifier(&nmv_port_notifier);
	if (err)
		goto no_port_notifier;
	err = register_netdevice_notifier(&nmv_tap_notifier);
	if (err)
		goto no_tap_notifier;
	err = rtnl_link_register(&nmv_vlan_ops);
	if (err)
		goto no_vlan;
	err = rtnl_link_register(&nmv_tap_ops);
	if (err)
		goto no_tap;
	return 0;

no_tap:
	rtnl_link_unregister(&nmv_vlan_ops);
no_vlan:
	unregister_netdevice_notifier(&nmv_tap_notifier);
no_tap_notifier:
	unregister_netdevice_notifier(&nmv_port_notifier);
no_port_notifier:
	nmv_tap_unregister();
	return err;
}
module_init(nmv_init);

static void __exit nmv_exit(void)
{
	rtnl_link_unregister(&nmv_tap_ops);
	rtnl_link_unregister(&nmv_vlan_ops);
	unregister_netdevice_notifier(&nmv_tap_notifier);
	unregister_netdevice_notifier(&nmv_port_notifier);
	nmv_tap_unregister();
	/* What tapq.c frees after a grace period. */
	rcu_barrier();
}
module_exit(nmv_exit);

MODULE_ALIAS_RTNL_LINK("napi_macvlan");
MODULE_ALIAS_RTNL_LINK("napi_macvtap");
MODULE_DESCRIPTION("MAC address based virtual LANs with a NAPI instance of their own");
MODULE_VERSION("0.1.0");
MODULE_AUTHOR("The vsrtune project");
MODULE_LICENSE("GPL");
