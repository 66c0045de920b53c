// SPDX-License-Identifier: GPL-2.0
/*
 * Ports: the hold on a lower device, its table of MAC addresses, and what
 * happens to our devices when something happens to the lower one.
 *
 * The receive handler of the lower device is taken when the first of our
 * devices comes up and given back when the last one goes down, so that
 * devices can be made while macvlan or macvtap still has the lower device.
 */
#include <linux/rtnetlink.h>
#include "nmv.h"

/**
 * nmv_port_find() - the device with a MAC address
 * @port: port
 * @addr: MAC address
 *
 * Context: RCU read side, or RTNL.
 * Return: a device that is up, or NULL
 */
struct nmv_dev *nmv_port_find(const struct nmv_port *port, const u8 *addr)
{
	const struct hlist_head *bucket = &port->hash[nmv_hash_mac(addr)];
	struct nmv_dev *nd;

	hlist_for_each_entry_rcu(nd, bucket, in_hash, lockdep_rtnl_is_held())
		if (ether_addr_equal_64bits(nd->dev->dev_addr, addr))
			return nd;
	return NULL;
}

/**
 * nmv_port_taken() - does anybody else on the lower device have that address
 * @nd: the device that wants it
 * @addr: MAC address
 *
 * Context: RTNL.
 * Return: true if so; a passthru device has no siblings
 */
bool nmv_port_taken(const struct nmv_dev *nd, const u8 *addr)
{
	const struct nmv_port *port = rtnl_dereference(nd->port);
	const struct nmv_dev *other;

	if (nd->mode == MACVLAN_MODE_PASSTHRU)
		return false;
	if (ether_addr_equal(nd->lower->dev_addr, addr))
		return true;
	other = port ? nmv_port_find(port, addr) : NULL;
	return other && other != nd;
}

static struct nmv_port *nmv_port_on(const struct net_device *lower)
{
	if (rtnl_dereference(lower->rx_handler) != nmv_handle_frame)
		return NULL;
	return rtnl_dereference(lower->rx_handler_data);
}

static struct nmv_port *nmv_port_claim(struct nmv_dev *nd)
{
	struct nmv_port *port;
	unsigned int i;
	int err;

	port = kzalloc(sizeof(*port), GFP_KERNEL);
	if (!port)
		return ERR_PTR(-ENOMEM);
	port->lower = nd->lower;
	port->passthru = nd->mode == MACVLAN_MODE_PASSTHRU;
	ether_addr_copy(port->perm_addr, nd->lower->dev_addr);
	INIT_LIST_HEAD(&port->devs);
	for (i = 0; i < NMV_HASH_SIZE; i++)
		INIT_HLIST_HEAD(&port->hash[i]);
	err = nmv_bcast_init(port);
	if (err)
		goto no_bcast;
	err = netdev_rx_handler_register(nd->lower, nmv_handle_frame, port);
	if (!err)
		return port;
	nmv_bcast_exit(port);
no_bcast:
	kfree(port);
	/* Root of a user namespace may try for ever. */
	if (err == -EBUSY && net_ratelimit())
		netdev_info(nd->dev,
			    "%s is in use by macvlan, macvtap, a bridge or a bond; take all of those off it, then bring this device up\n",
			    nd->lower->name);
	return ERR_PTR(err);
}

/* Waits, too, until nobody is in the receive handler any more. */
static void nmv_port_release(struct nmv_port *port)
{
	netdev_rx_handler_unregister(port->lower);
	nmv_bcast_exit(port);
	kfree_rcu(port, rcu);
}

/**
 * nmv_port_join() - a device comes up on its lower device
 * @nd: device; its queue is running
 *
 * Context: RTNL.
 * Return: 0; -EBUSY if the lower device has another master's receive handler,
 * or a passthru device is up on it, or this one wants passthru and others are
 * up; -EADDRINUSE if another has the same MAC.
 */
int nmv_port_join(struct nmv_dev *nd)
{
	struct nmv_port *port = nmv_port_on(nd->lower);
	bool passthru = nd->mode == MACVLAN_MODE_PASSTHRU;

	if (port && (port->passthru || passthru)) {
		if (net_ratelimit())
			netdev_info(nd->dev,
				    "a passthru device must be the only one on %s; bring the others down\n",
				    nd->lower->name);
		return -EBUSY;
	}
	if (!port)
		port = nmv_port_claim(nd);
	if (IS_ERR(port))
		return PTR_ERR(port);
	if (nmv_port_find(port, nd->dev->dev_addr) ||
	    nmv_port_taken(nd, nd->dev->dev_addr)) {
		if (!port->count)
			nmv_port_release(port);
		return -EADDRINUSE;
	}
	port->count++;
	rcu_assign_pointer(nd->port, port);
	list_add_tail_rcu(&nd->in_port, &port->devs);
	hlist_add_head_rcu(&nd->in_hash,
			   &port->hash[nmv_hash_mac(nd->dev->dev_addr)]);
	if (nd->uplink)
		rcu_assign_pointer(port->uplink, nd);
	return 0;
}

static bool nmv_is_uplink(const struct net_device *dev)
{
	const struct nmv_dev *nd = netdev_priv(dev);

	return nd->uplink;
}

/**
 * nmv_port_set_uplink() - the flag uplink of a device
 * @nd: device, up or down
 * @on: set it, or clear it
 *
 * The device keeps it while it is down; the port then has none. A frame that
 * is on its way when the flag is cleared may still come.
 *
 * Context: RTNL.
 * Return: 0; -EBUSY if another device on the lower device has it.
 */
int nmv_port_set_uplink(struct nmv_dev *nd, bool on)
{
	struct nmv_port *port = rtnl_dereference(nd->port);
	struct net_device *upper;
	struct list_head *iter;

	if (on == nd->uplink)
		return 0;
	if (on)
		netdev_for_each_upper_dev_rcu(nd->lower, upper, iter)
			if (nmv_is_ours(upper) && nmv_is_uplink(upper))
				return -EBUSY;
	nd->uplink = on;
	if (port)
		rcu_assign_pointer(port->uplink, on ? nd : NULL);
	return 0;
}

/**
 * nmv_port_leave() - a device goes down
 * @nd: device
 *
 * When it returns no frame is on its way from the port to the device.
 *
 * Context: RTNL.
 */
void nmv_port_leave(struct nmv_dev *nd)
{
	struct nmv_port *port = rtnl_dereference(nd->port);

	if (rtnl_dereference(port->uplink) == nd)
		RCU_INIT_POINTER(port->uplink, NULL);
	hlist_del_rcu(&nd->in_hash);
	nmv_bcast_forget(port, nd);
	RCU_INIT_POINTER(nd->port, NULL);
	if (--port->count)
		synchronize_net();
	else
		nmv_port_release(port);
}

/**
 * nmv_port_rehash() - change the MAC address of a device
 * @nd: device, up or down
 * @addr: new address
 *
 * Context: RTNL.
 */
void nmv_port_rehash(struct nmv_dev *nd, const u8 *addr)
{
	struct nmv_port *port = rtnl_dereference(nd->port);

	if (!port) {
		eth_hw_addr_set(nd->dev, addr);
		return;
	}
	hlist_del_rcu(&nd->in_hash);
	/* A reader on the old chain must not walk on into the new one. */
	synchronize_net();
	eth_hw_addr_set(nd->dev, addr);
	hlist_add_head_rcu(&nd->in_hash, &port->hash[nmv_hash_mac(addr)]);
}

/* The lower device has another MAC; a passthru device follows. */
static int nmv_lower_mac(struct nmv_dev *nd)
{
	struct nmv_port *port = rtnl_dereference(nd->port);

	if (nd->mode != MACVLAN_MODE_PASSTHRU || !port)
		return NOTIFY_DONE;
	/* It was not us, so this is what the administrator wants it to have. */
	if (!port->lending)
		ether_addr_copy(port->perm_addr, nd->lower->dev_addr);
	if (ether_addr_equal(nd->dev->dev_addr, nd->lower->dev_addr))
		return NOTIFY_DONE;
	nmv_port_rehash(nd, nd->lower->dev_addr);
	call_netdevice_notifiers(NETDEV_CHANGEADDR, nd->dev);
	return NOTIFY_DONE;
}

static int nmv_lower_event(struct nmv_dev *nd, unsigned long event)
{
	struct net_device *dev = nd->dev, *lower = nd->lower;

	switch (event) {
	case NETDEV_UP:
	case NETDEV_DOWN:
	case NETDEV_CHANGE:
		netif_stacked_transfer_operstate(lower, dev);
		break;
	case NETDEV_FEAT_CHANGE:
		netif_inherit_tso_max(dev, lower);
		dev->needed_headroom = lower->needed_headroom;
		dev->needed_tailroom = lower->needed_tailroom;
		netdev_update_features(dev);
		break;
	case NETDEV_CHANGEMTU:
		if (dev->mtu > lower->mtu)
			dev_set_mtu(dev, lower->mtu);
		break;
	case NETDEV_CHANGEADDR:
		return nmv_lower_mac(nd);
	case NETDEV_PRE_TYPE_CHANGE:
		/* Our devices are Ethernet and cannot become anything else. */
		return NOTIFY_BAD;
	case NETDEV_NOTIFY_PEERS:
	case NETDEV_BONDING_FAILOVER:
	case NETDEV_RESEND_IGMP:
		call_netdevice_notifiers(event, dev);
		break;
	}
	return NOTIFY_DONE;
}

static struct net_device *nmv_first_on(struct net_device *lower)
{
	struct net_device *upper;
	struct list_head *iter;

	netdev_for_each_upper_dev_rcu(lower, upper, iter)
		if (nmv_is_ours(upper))
			return upper;
	return NULL;
}

static void nmv_lower_goes(struct net_device *lower)
{
	struct net_device *dev;
	LIST_HEAD(kill);

	/* That also takes each off the list of those above. */
	while ((dev = nmv_first_on(lower)))
		dev->rtnl_link_ops->dellink(dev, &kill);
	unregister_netdevice_many(&kill);
}

/* A macvlan's own address would be let through by the NIC and be given to
 * nobody: macvlan asks with dev_uc_add(), which no one can refuse.
 */
static bool nmv_deaf_upper(const struct net_device *dev,
			   const struct netdev_notifier_changeupper_info *info)
{
	struct nmv_dev *nd = netdev_priv(dev);

	return info->linking && netif_is_macvlan(info->upper_dev) &&
	       nd->mode != MACVLAN_MODE_PASSTHRU;
}

static int nmv_port_event(struct notifier_block *unused, unsigned long event,
			  void *ptr)
{
	struct net_device *lower = netdev_notifier_info_to_dev(ptr);
	struct net_device *upper;
	struct list_head *iter;
	int ret;

	if (event == NETDEV_PRECHANGEUPPER && nmv_is_ours(lower) &&
	    nmv_deaf_upper(lower, ptr)) {
		NL_SET_ERR_MSG(netdev_notifier_info_to_extack(ptr),
			       "A macvlan of this device would get no frames; make a napi_macvlan of its lower device");
		return notifier_from_errno(-EOPNOTSUPP);
	}
	if (event == NETDEV_UNREGISTER) {
		/* Also sent when it moves to another namespace; then it stays. */
		if (lower->reg_state == NETREG_UNREGISTERING)
			nmv_lower_goes(lower);
		return NOTIFY_DONE;
	}
	netdev_for_each_upper_dev_rcu(lower, upper, iter) {
		if (!nmv_is_ours(upper))
			continue;
		ret = nmv_lower_event(netdev_priv(upper), event);
		if (ret != NOTIFY_DONE)
			return ret;
	}
	return NOTIFY_DONE;
}

struct notifier_block nmv_port_notifier = {
	.notifier_call	= nmv_port_event,
};
