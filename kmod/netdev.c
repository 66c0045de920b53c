// SPDX-License-Identifier: GPL-2.0
/* The network device: up and down, addresses, filters, MTU, features. */
#include <linux/capability.h>
#include <linux/if_vlan.h>
#include <linux/module.h>
#include <linux/rtnetlink.h>
#include "nmv.h"
#include "nmv_compat.h"

/* Done in software below us where the NIC cannot. */
#define NMV_F_ALWAYS	(NETIF_F_SG | NETIF_F_HW_CSUM | NETIF_F_GSO_SOFTWARE | \
			 NETIF_F_GSO_ROBUST | NETIF_F_GSO_ENCAP_ALL)
/* Taken from the lower device. Not LRO: nothing here puts frames together that
 * way, and a namespace that forwards could not switch it off with us.
 */
#define NMV_F_LOWER	(NETIF_F_HIGHDMA | NETIF_F_FRAGLIST | NETIF_F_GRO | \
			 NETIF_F_RXCSUM | \
			 NETIF_F_HW_VLAN_CTAG_FILTER | \
			 NETIF_F_HW_VLAN_STAG_FILTER)
/* What a guest that takes no large frames makes tap.ko ask us to leave. */
#define NMV_F_RX	(NETIF_F_GRO | NETIF_F_LRO)

/*
 * Which multicast a device listens to. Nobody tells the host which groups a
 * guest joins, so a guest gets all.
 */
static void nmv_update_filter(struct nmv_dev *nd)
{
	DECLARE_BITMAP(filter, NMV_MC_BITS);
	struct netdev_hw_addr *ha;

	if (nd->tap || nd->dev->flags & (IFF_PROMISC | IFF_ALLMULTI)) {
		bitmap_fill(nd->mc_filter, NMV_MC_BITS);
		return;
	}
	bitmap_zero(filter, NMV_MC_BITS);
	__set_bit(nmv_hash_mc(nd->dev->broadcast), filter);
	netdev_for_each_mc_addr(ha, nd->dev)
		__set_bit(nmv_hash_mc(ha->addr), filter);
	bitmap_copy(nd->mc_filter, filter, NMV_MC_BITS);
}

static void nmv_set_rx_mode(struct net_device *dev)
{
	struct nmv_dev *nd = netdev_priv(dev);

	/* An address that was given up stays in the list until that. */
	dev_uc_sync(nd->lower, dev);
	dev_mc_sync(nd->lower, dev);
	nmv_update_filter(nd);
}

static bool nmv_wants_promisc(const struct nmv_dev *nd)
{
	return nd->mode == MACVLAN_MODE_PASSTHRU || nd->dev->flags & IFF_PROMISC;
}

static bool nmv_wants_allmulti(const struct nmv_dev *nd)
{
	return nd->tap || nd->dev->flags & IFF_ALLMULTI;
}

static void nmv_change_rx_flags(struct net_device *dev, int change)
{
	struct nmv_dev *nd = netdev_priv(dev);

	if (!(dev->flags & IFF_UP))
		return;
	if (change & IFF_ALLMULTI && !nd->tap)
		dev_set_allmulti(nd->lower, dev->flags & IFF_ALLMULTI ? 1 : -1);
	if (change & IFF_PROMISC && nd->mode != MACVLAN_MODE_PASSTHRU)
		dev_set_promiscuity(nd->lower,
				    dev->flags & IFF_PROMISC ? 1 : -1);
}

static int nmv_lower_set_mac(struct net_device *lower, const u8 *addr)
{
	struct sockaddr_storage ss = { .ss_family = lower->type };

	if (ether_addr_equal(lower->dev_addr, addr))
		return 0;
	memcpy(((struct sockaddr *)&ss)->sa_data, addr, ETH_ALEN);
	return dev_set_mac_address(lower, (void *)&ss, NULL);
}

/* A passthru device that is up: the lower device has its MAC. */
static int nmv_lend_mac(struct nmv_dev *nd, const u8 *addr)
{
	struct nmv_port *port = rtnl_dereference(nd->port);
	int err;

	port->lending = true;
	err = nmv_lower_set_mac(nd->lower, addr);
	port->lending = false;
	return err;
}

/*
 * Let the lower device's filter pass what this one wants to hear. The MAC
 * comes last: taking the rest back cannot fail, giving a MAC back can.
 */
static int nmv_open_filters(struct nmv_dev *nd)
{
	struct net_device *lower = nd->lower;
	int err;

	if (nmv_wants_allmulti(nd)) {
		err = dev_set_allmulti(lower, 1);
		if (err)
			return err;
	}
	if (nmv_wants_promisc(nd)) {
		err = dev_set_promiscuity(lower, 1);
		if (err)
			goto no_promisc;
	}
	if (nd->mode == MACVLAN_MODE_PASSTHRU)
		err = nmv_lend_mac(nd, nd->dev->dev_addr);
	else
		err = dev_uc_add(lower, nd->dev->dev_addr);
	if (err)
		goto no_mac;
	return 0;

no_mac:
	if (nmv_wants_promisc(nd))
		dev_set_promiscuity(lower, -1);
no_promisc:
	if (nmv_wants_allmulti(nd))
		dev_set_allmulti(lower, -1);
	return err;
}

static void nmv_close_filters(struct nmv_dev *nd)
{
	struct net_device *lower = nd->lower;

	dev_uc_unsync(lower, nd->dev);
	dev_mc_unsync(lower, nd->dev);
	if (nmv_wants_promisc(nd))
		dev_set_promiscuity(lower, -1);
	if (nmv_wants_allmulti(nd))
		dev_set_allmulti(lower, -1);
	if (nd->mode != MACVLAN_MODE_PASSTHRU)
		dev_uc_del(lower, nd->dev->dev_addr);
}

static int nmv_open(struct net_device *dev)
{
	struct nmv_dev *nd = netdev_priv(dev);
	int err;

	if (!(nd->lower->flags & IFF_UP))
		return -ENETDOWN;
	nd->queue.high_water = 0;
	err = nmv_port_join(nd);
	if (err)
		goto no_port;
	err = nmv_open_filters(nd);
	if (err)
		goto no_filters;
	netif_stacked_transfer_operstate(nd->lower, dev);
	return 0;

no_filters:
	nmv_port_leave(nd);
no_port:
	nmv_queue_stop(nd);
	return err;
}

static int nmv_stop(struct net_device *dev)
{
	struct nmv_dev *nd = netdev_priv(dev);
	u8 perm_addr[ETH_ALEN];

	ether_addr_copy(perm_addr, rtnl_dereference(nd->port)->perm_addr);
	nmv_close_filters(nd);
	nmv_port_leave(nd);
	nmv_queue_stop(nd);
	if (nd->mode == MACVLAN_MODE_PASSTHRU &&
	    nd->lower->reg_state == NETREG_REGISTERED &&
	    nmv_lower_set_mac(nd->lower, perm_addr))
		netdev_warn(dev, "%s did not take its own MAC %pM back; set it with ip link set\n",
			    nd->lower->name, perm_addr);
	return 0;
}

static int nmv_set_mac_address(struct net_device *dev, void *p)
{
	struct nmv_dev *nd = netdev_priv(dev);
	const u8 *addr = ((struct sockaddr *)p)->sa_data;
	int err;

	if (!is_valid_ether_addr(addr))
		return -EADDRNOTAVAIL;
	if (ether_addr_equal(dev->dev_addr, addr))
		return 0;
	/* tap.ko asks nobody for SIOCSIFHWADDR, and a QEMU with the descriptor
	 * would take what siblings send to others.
	 */
	if (nd->tap && !ns_capable(dev_net(dev)->user_ns, CAP_NET_ADMIN))
		return -EPERM;
	if (!(dev->flags & IFF_UP)) {
		eth_hw_addr_set(dev, addr);
		return 0;
	}
	/* Comes back to us as NETDEV_CHANGEADDR of the lower device. */
	if (nd->mode == MACVLAN_MODE_PASSTHRU)
		return nmv_lend_mac(nd, addr);
	if (nmv_port_taken(nd, addr))
		return -EADDRINUSE;
	err = dev_uc_add(nd->lower, addr);
	if (err)
		return err;
	dev_uc_del(nd->lower, dev->dev_addr);
	nmv_port_rehash(nd, addr);
	return 0;
}

static int nmv_change_mtu(struct net_device *dev, int mtu)
{
	struct nmv_dev *nd = netdev_priv(dev);

	if (mtu > nd->lower->mtu)
		return -EINVAL;
	WRITE_ONCE(dev->mtu, mtu);
	return 0;
}

static netdev_features_t nmv_fix_features(struct net_device *dev,
					  netdev_features_t features)
{
	struct nmv_dev *nd = netdev_priv(dev);
	netdev_features_t have, user = dev->hw_features;

	have = (nd->lower->features & NMV_F_LOWER) | NMV_F_ALWAYS;
	have &= ~user;
	have |= features & (user | NMV_F_STICKY);
	if (nd->tap)
		have &= nd->tap->rx_features | ~NMV_F_RX;
	return have;
}

static int nmv_vlan_rx_add_vid(struct net_device *dev, __be16 proto, u16 vid)
{
	struct nmv_dev *nd = netdev_priv(dev);

	return vlan_vid_add(nd->lower, proto, vid);
}

static int nmv_vlan_rx_kill_vid(struct net_device *dev, __be16 proto, u16 vid)
{
	struct nmv_dev *nd = netdev_priv(dev);

	vlan_vid_del(nd->lower, proto, vid);
	return 0;
}

/*
 * Frames that a guest's or a container's bridge forwards have other addresses:
 * passthru takes all of them anyway. In other modes a unicast address beside
 * the device's own would be let through by the NIC and be given to nobody.
 */
static int nmv_fdb_check(const struct nmv_dev *nd, const unsigned char *addr,
			 struct netlink_ext_ack *extack)
{
	if (nd->mode == MACVLAN_MODE_PASSTHRU || !is_unicast_ether_addr(addr))
		return 0;
	NL_SET_ERR_MSG(extack,
		       "only a passthru device can have further unicast addresses");
	return -EOPNOTSUPP;
}

static int nmv_fdb_add(struct ndmsg *ndm, struct nlattr *tb[],
		       struct net_device *dev, const unsigned char *addr,
		       u16 vid, u16 flags, NMV_FDB_ARGS)
{
	return nmv_fdb_check(netdev_priv(dev), addr, extack) ?:
	       ndo_dflt_fdb_add(ndm, tb, dev, addr, vid, flags);
}

static int nmv_fdb_del(struct ndmsg *ndm, struct nlattr *tb[],
		       struct net_device *dev, const unsigned char *addr,
		       u16 vid, NMV_FDB_ARGS)
{
	return nmv_fdb_check(netdev_priv(dev), addr, extack) ?:
	       ndo_dflt_fdb_del(ndm, tb, dev, addr, vid);
}

#ifdef NMV_HAVE_HWTSTAMP
static int nmv_hwtstamp_get(struct net_device *dev,
			    struct kernel_hwtstamp_config *config)
{
	struct nmv_dev *nd = netdev_priv(dev);

	return generic_hwtstamp_get_lower(nd->lower, config);
}

/* All who use the NIC share its setting: for who rules the lower device. */
static int nmv_hwtstamp_set(struct net_device *dev,
			    struct kernel_hwtstamp_config *config,
			    struct netlink_ext_ack *extack)
{
	struct nmv_dev *nd = netdev_priv(dev);

	if (!ns_capable(dev_net(nd->lower)->user_ns, CAP_NET_ADMIN)) {
		NL_SET_ERR_MSG(extack,
			       "this needs CAP_NET_ADMIN where the lower device is");
		return -EPERM;
	}
	return generic_hwtstamp_set_lower(nd->lower, config, extack);
}
#endif

static int nmv_get_iflink(const struct net_device *dev)
{
	const struct nmv_dev *nd = netdev_priv(dev);

	return READ_ONCE(nd->lower->ifindex);
}

static int nmv_init_dev(struct net_device *dev)
{
	struct nmv_dev *nd = netdev_priv(dev);
	struct net_device *lower = nd->lower;
	int err;

	/* A module with devices stays: its rmmod would cut off its guests. */
	if (!try_module_get(THIS_MODULE))
		return -ENODEV;
	nd->stats = netdev_alloc_pcpu_stats(struct nmv_pcpu);
	if (!nd->stats) {
		module_put(THIS_MODULE);
		return -ENOMEM;
	}
	if (nd->tap) {
		err = nmv_tap_attach(nd);
		if (err) {
			free_percpu(nd->stats);
			module_put(THIS_MODULE);
			return err;
		}
	}
	/* The device itself has one, however many have places in statistics. */
	netif_set_real_num_rx_queues(dev, 1);
	netif_set_real_num_tx_queues(dev, 1);
	nmv_queue_init(nd);
	netdev_hold(lower, &nd->tracker, GFP_KERNEL);

	/* They nest in those of the lower device, which may be of any kind. */
	netdev_lockdep_set_classes(dev);
	nmv_set_lltx(dev);
	dev->features |= (lower->features & NMV_F_LOWER) | NMV_F_ALWAYS;
	dev->vlan_features = (lower->vlan_features & NMV_F_LOWER) |
			     NMV_F_ALWAYS;
	dev->hw_enc_features |= dev->features;
	dev->needed_headroom = lower->needed_headroom;
	dev->needed_tailroom = lower->needed_tailroom;
	if (lower->hard_header_len > dev->hard_header_len)
		dev->needed_headroom += lower->hard_header_len -
					dev->hard_header_len;
	netif_inherit_tso_max(dev, lower);
	netif_stacked_transfer_operstate(lower, dev);
	return 0;
}

static void nmv_uninit_dev(struct net_device *dev)
{
	struct nmv_dev *nd = netdev_priv(dev);

	nmv_queue_exit(nd);
	if (nd->tap)
		nmv_tap_detach(nd);
}

/* The last of our code to run for a device, so it lets the module go. */
static void nmv_free_dev(struct net_device *dev)
{
	struct nmv_dev *nd = netdev_priv(dev);

	free_percpu(nd->stats);
	netdev_put(nd->lower, &nd->tracker);
	module_put(THIS_MODULE);
}

static const struct net_device_ops nmv_netdev_ops = {
	.ndo_init		= nmv_init_dev,
	.ndo_uninit		= nmv_uninit_dev,
	.ndo_open		= nmv_open,
	.ndo_stop		= nmv_stop,
	.ndo_start_xmit		= nmv_start_xmit,
	.ndo_set_rx_mode	= nmv_set_rx_mode,
	.ndo_change_rx_flags	= nmv_change_rx_flags,
	.ndo_set_mac_address	= nmv_set_mac_address,
	.ndo_validate_addr	= eth_validate_addr,
	.ndo_change_mtu		= nmv_change_mtu,
	.ndo_fix_features	= nmv_fix_features,
	.ndo_get_stats64	= nmv_get_stats64,
	.ndo_vlan_rx_add_vid	= nmv_vlan_rx_add_vid,
	.ndo_vlan_rx_kill_vid	= nmv_vlan_rx_kill_vid,
	.ndo_fdb_add		= nmv_fdb_add,
	.ndo_fdb_del		= nmv_fdb_del,
#ifdef NMV_HAVE_HWTSTAMP
	.ndo_hwtstamp_get	= nmv_hwtstamp_get,
	.ndo_hwtstamp_set	= nmv_hwtstamp_set,
#endif
	.ndo_get_iflink		= nmv_get_iflink,
	.ndo_features_check	= passthru_features_check,
};

/**
 * nmv_setup() - fill in a new network device of either kind
 * @dev: device
 */
void nmv_setup(struct net_device *dev)
{
	ether_setup(dev);
	dev->max_mtu = ETH_MAX_MTU;
	/* A queueing discipline would hand frames to whichever task dequeues;
	 * the sender itself must run us.
	 */
	dev->priv_flags |= IFF_NO_QUEUE | IFF_UNICAST_FLT | IFF_DISABLE_NETPOLL;
	dev->priv_flags &= ~IFF_TX_SKB_SHARING;
	netif_keep_dst(dev);
	dev->netdev_ops = &nmv_netdev_ops;
	dev->ethtool_ops = &nmv_ethtool_ops;
	nmv_stats_setup(dev);
	dev->needs_free_netdev = true;
	dev->priv_destructor = nmv_free_dev;
}
