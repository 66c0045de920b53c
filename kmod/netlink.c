// SPDX-License-Identifier: GPL-2.0
/*
 * The link kinds napi_macvlan and napi_macvtap. Of macvlan's attributes they
 * have IFLA_MACVLAN_MODE, and IFLA_MACVLAN_BC_QUEUE_LEN for the length of the
 * own queue; linux/napi_macvlan.h has those of their own.
 */
#include <linux/capability.h>
#include <linux/if_arp.h>
#include <linux/if_link.h>
#include <linux/napi_macvlan.h>
#include <linux/sched.h>
#include "nmv.h"
#include "nmv_compat.h"

/* More than there are: the rest is looked at, to refuse it. */
#define NMV_ATTR_MAX	31

static const struct nla_policy nmv_policy[NMV_ATTR_MAX + 1] = {
	[IFLA_MACVLAN_MODE]		= { .type = NLA_U32 },
	[IFLA_MACVLAN_BC_QUEUE_LEN]	= NLA_POLICY_RANGE(NLA_U32, 1,
							   NMV_QUEUE_LEN_MAX),
	[IFLA_NAPI_MACVLAN_EVERY_QUEUE]	= NLA_POLICY_MAX(NLA_U8, 1),
	[IFLA_NAPI_MACVLAN_UPLINK]	= NLA_POLICY_MAX(NLA_U8, 1),
	[IFLA_NAPI_MACVLAN_THREAD]	= { .type = NLA_REJECT,
					    .reject_message = "the thread can only be read" },
};

static bool nmv_attr_known(int attr)
{
	return attr == IFLA_MACVLAN_MODE || attr == IFLA_MACVLAN_BC_QUEUE_LEN ||
	       attr == IFLA_NAPI_MACVLAN_EVERY_QUEUE ||
	       attr == IFLA_NAPI_MACVLAN_UPLINK;
}

bool nmv_is_ours(const struct net_device *dev)
{
	return dev->rtnl_link_ops == &nmv_vlan_ops ||
	       dev->rtnl_link_ops == &nmv_tap_ops;
}

static int nmv_validate(struct nlattr *tb[], struct nlattr *data[],
			struct netlink_ext_ack *extack)
{
	int i;

	if (tb[IFLA_ADDRESS]) {
		if (nla_len(tb[IFLA_ADDRESS]) != ETH_ALEN) {
			NL_SET_ERR_MSG(extack, "a MAC address has 6 bytes");
			return -EINVAL;
		}
		if (!is_valid_ether_addr(nla_data(tb[IFLA_ADDRESS]))) {
			NL_SET_ERR_MSG(extack,
				       "the MAC address must be unicast and not zero");
			return -EADDRNOTAVAIL;
		}
	}
	for (i = 1; data && i <= NMV_ATTR_MAX; i++) {
		if (!data[i] || nmv_attr_known(i))
			continue;
		NL_SET_ERR_MSG_ATTR(extack, data[i],
				    "not an attribute of this kind; of those of macvlan it has the mode and bcqueuelen");
		return -EOPNOTSUPP;
	}
	if (data && data[IFLA_MACVLAN_MODE] &&
	    !nmv_mode_known(nla_get_u32(data[IFLA_MACVLAN_MODE]))) {
		NL_SET_ERR_MSG(extack,
			       "mode must be 1 private, 2 vepa, 4 bridge or 8 passthru");
		return -EINVAL;
	}
	return 0;
}

static int nmv_check_lower(const struct net_device *lower,
			   struct netlink_ext_ack *extack)
{
	if (!lower) {
		NL_SET_ERR_MSG(extack,
			       "no such lower device in that namespace");
		return -ENODEV;
	}
	if (lower->type != ARPHRD_ETHER || lower->flags & IFF_LOOPBACK) {
		NL_SET_ERR_MSG(extack, "the lower device is not Ethernet");
		return -EINVAL;
	}
	if (nmv_is_ours(lower)) {
		NL_SET_ERR_MSG(extack,
			       "the lower device is a napi_macvlan or napi_macvtap itself; name the one below it");
		return -EINVAL;
	}
	return 0;
}

/* Those of napi_macvtap alone. On failure nothing is set. */
static int nmv_set_tap_attrs(struct nmv_dev *nd, struct nlattr *data[],
			     struct netlink_ext_ack *extack)
{
	struct nlattr *every = data[IFLA_NAPI_MACVLAN_EVERY_QUEUE];
	struct nlattr *uplink = data[IFLA_NAPI_MACVLAN_UPLINK];
	int err;

	if (!every && !uplink)
		return 0;
	if (!nd->tap) {
		NL_SET_ERR_MSG_ATTR(extack, every ?: uplink,
				    "only a napi_macvtap can have this");
		return -EOPNOTSUPP;
	}
	if (uplink) {
		/* It takes what siblings send: for who rules the lower device. */
		if (nla_get_u8(uplink) && !nd->uplink &&
		    !ns_capable(dev_net(nd->lower)->user_ns, CAP_NET_ADMIN)) {
			NL_SET_ERR_MSG_ATTR(extack, uplink,
					    "an uplink needs CAP_NET_ADMIN where the lower device is");
			return -EPERM;
		}
		err = nmv_port_set_uplink(nd, nla_get_u8(uplink));
		if (err) {
			NL_SET_ERR_MSG_ATTR(extack, uplink,
					    "another device of the lower device is the uplink");
			return err;
		}
	}
	if (every)
		WRITE_ONCE(nd->tap->every_queue, nla_get_u8(every));
	return 0;
}

static int nmv_newlink(NMV_NEWLINK_ARGS)
{
	struct nlattr **attr = nmv_newlink_tb(), **info = nmv_newlink_data();
	struct nmv_dev *nd = netdev_priv(dev);
	struct net_device *lower;
	int err;

	if (!attr[IFLA_LINK]) {
		NL_SET_ERR_MSG(extack, "name the lower device: link DEVICE");
		return -EINVAL;
	}
	lower = __dev_get_by_index(nmv_newlink_net(),
				   nla_get_u32(attr[IFLA_LINK]));
	err = nmv_check_lower(lower, extack);
	if (err)
		return err;

	nd->dev = dev;
	nd->lower = lower;
	nd->mode = MACVLAN_MODE_BRIDGE;
	if (info && info[IFLA_MACVLAN_MODE])
		nd->mode = nla_get_u32(info[IFLA_MACVLAN_MODE]);
	nd->queue.limit = NMV_QUEUE_LEN;
	if (info && info[IFLA_MACVLAN_BC_QUEUE_LEN])
		nd->queue.limit = nla_get_u32(info[IFLA_MACVLAN_BC_QUEUE_LEN]);
	err = info ? nmv_set_tap_attrs(nd, info, extack) : 0;
	if (err)
		return err;
	if (nd->tap && dev->tx_queue_len > NMV_QUEUE_LEN_MAX) {
		NL_SET_ERR_MSG(extack, "txqueuelen is at most 32767");
		return -EINVAL;
	}

	if (!attr[IFLA_MTU]) {
		dev->mtu = lower->mtu;
	} else if (dev->mtu > lower->mtu) {
		NL_SET_ERR_MSG(extack, "the MTU is above that of the lower device");
		return -EINVAL;
	}
	if (!attr[IFLA_ADDRESS]) {
		if (nd->mode == MACVLAN_MODE_PASSTHRU)
			eth_hw_addr_inherit(dev, lower);
		else
			eth_hw_addr_random(dev);
	}

	err = register_netdevice(dev);
	if (err)
		goto wait;
	err = netdev_upper_dev_link(lower, dev, extack);
	if (err) {
		unregister_netdevice(dev);
		return err;
	}
	netif_stacked_transfer_operstate(lower, dev);
	linkwatch_fire_event(dev);
	return 0;

wait:
	/* The caller frees it at once, but it may have been seen by then. */
	synchronize_net();
	return err;
}

static void nmv_dellink(struct net_device *dev, struct list_head *head)
{
	struct nmv_dev *nd = netdev_priv(dev);

	unregister_netdevice_queue(dev, head);
	netdev_upper_dev_unlink(nd->lower, dev);
}

static int nmv_changelink(struct net_device *dev, struct nlattr *tb[],
			  struct nlattr *data[],
			  struct netlink_ext_ack *extack)
{
	struct nmv_dev *nd = netdev_priv(dev);
	u32 mode = nd->mode;
	int err;

	if (!data)
		return 0;
	if (data[IFLA_MACVLAN_MODE])
		mode = nla_get_u32(data[IFLA_MACVLAN_MODE]);
	if (!nmv_mode_changeable(nd->mode, mode)) {
		NL_SET_ERR_MSG(extack,
			       "a device cannot change to or from passthru; delete it and make it anew");
		return -EINVAL;
	}
	err = nmv_set_tap_attrs(nd, data, extack);
	if (err)
		return err;
	WRITE_ONCE(nd->mode, mode);
	if (data[IFLA_MACVLAN_BC_QUEUE_LEN])
		WRITE_ONCE(nd->queue.limit,
			   nla_get_u32(data[IFLA_MACVLAN_BC_QUEUE_LEN]));
	return 0;
}

static size_t nmv_get_size(const struct net_device *dev)
{
	return nla_total_size(sizeof(u32)) +	/* IFLA_MACVLAN_MODE */
	       nla_total_size(sizeof(u32)) +	/* IFLA_MACVLAN_BC_QUEUE_LEN */
	       nla_total_size(sizeof(u8)) +	/* IFLA_NAPI_MACVLAN_EVERY_QUEUE */
	       nla_total_size(sizeof(u8)) +	/* IFLA_NAPI_MACVLAN_UPLINK */
	       nla_total_size(sizeof(u32));	/* IFLA_NAPI_MACVLAN_THREAD */
}

/*
 * The thread is made and ended under RTNL, and on newer kernels under the
 * lock of the device alone. Once made it may stay when "threaded" is 0 again,
 * without work. Whoever tells of a link may hold that lock already, or the one
 * of a device above or below, so it is not waited for.
 */
static int nmv_fill_thread(struct sk_buff *skb, struct nmv_dev *nd)
{
	const struct napi_struct *napi = &nd->queue.napi;
	u32 id = 0;

	if (!nmv_netdev_trylock(nd->dev))
		return 0;
	if (napi->thread && test_bit(NAPI_STATE_THREADED, &napi->state))
		id = task_pid_nr(napi->thread);
	nmv_netdev_unlock(nd->dev);
	return nla_put_u32(skb, IFLA_NAPI_MACVLAN_THREAD, id);
}

static int nmv_fill_info(struct sk_buff *skb, const struct net_device *dev)
{
	struct nmv_dev *nd = netdev_priv(dev);

	if (nla_put_u32(skb, IFLA_MACVLAN_MODE, READ_ONCE(nd->mode)) ||
	    nla_put_u32(skb, IFLA_MACVLAN_BC_QUEUE_LEN,
			READ_ONCE(nd->queue.limit)) ||
	    nmv_fill_thread(skb, nd))
		return -EMSGSIZE;
	if (nd->tap &&
	    (nla_put_u8(skb, IFLA_NAPI_MACVLAN_EVERY_QUEUE,
			READ_ONCE(nd->tap->every_queue)) ||
	     nla_put_u8(skb, IFLA_NAPI_MACVLAN_UPLINK, nd->uplink)))
		return -EMSGSIZE;
	return 0;
}

static struct net *nmv_get_link_net(const struct net_device *dev)
{
	const struct nmv_dev *nd = netdev_priv(dev);

	return dev_net(nd->lower);
}

struct rtnl_link_ops nmv_vlan_ops = {
	.kind		= "napi_macvlan",
	.priv_size	= sizeof(struct nmv_dev),
	.setup		= nmv_setup,
	.validate	= nmv_validate,
	.newlink	= nmv_newlink,
	.changelink	= nmv_changelink,
	.dellink	= nmv_dellink,
	.get_size	= nmv_get_size,
	.fill_info	= nmv_fill_info,
	.get_link_net	= nmv_get_link_net,
	.policy		= nmv_policy,
	.maxtype	= NMV_ATTR_MAX,
};

static void nmv_tap_setup(struct net_device *dev)
{
	struct nmv_tap_dev *td = netdev_priv(dev);

	nmv_setup(dev);
	dev->tx_queue_len = NMV_TAP_QUEUE_LEN;
	td->nd.tap = &td->tap;
}

/* "numrxqueues": how many queues of /dev/tapN "ethtool -S" has a place for. */
static unsigned int nmv_tap_num_rx_queues(void)
{
	return NMV_TAP_SHOWN;
}

struct rtnl_link_ops nmv_tap_ops = {
	.kind		= "napi_macvtap",
	.priv_size	= sizeof(struct nmv_tap_dev),
	.setup		= nmv_tap_setup,
	.validate	= nmv_validate,
	.newlink	= nmv_newlink,
	.changelink	= nmv_changelink,
	.dellink	= nmv_dellink,
	.get_size	= nmv_get_size,
	.fill_info	= nmv_fill_info,
	.get_link_net	= nmv_get_link_net,
	.get_num_rx_queues = nmv_tap_num_rx_queues,
	.policy		= nmv_policy,
	.maxtype	= NMV_ATTR_MAX,
};
