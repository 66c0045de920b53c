/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Differences between the supported kernels, 6.1 and later. Kbuild looks into
 * their headers and defines NMV_HAVE_*; no other file asks for a version.
 */
#ifndef NMV_COMPAT_H
#define NMV_COMPAT_H

#include <linux/device/class.h>
#include <linux/netdevice.h>
#include <linux/ptr_ring.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <net/rtnetlink.h>
#ifdef NMV_HAVE_GSO_H
#include <net/gso.h>
#endif
#ifdef NMV_HAVE_NETDEV_LOCK_H
#include <net/netdev_lock.h>
#endif

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 1, 0)
#error "napi_macvlan supports Linux 6.1 and later"
#endif

/* The arguments of rtnl_link_ops.newlink, and how to reach what they hold. */
#ifdef NMV_HAVE_NEWLINK_PARAMS
#define NMV_NEWLINK_ARGS struct net_device *dev, \
	struct rtnl_newlink_params *params, struct netlink_ext_ack *extack
#define nmv_newlink_net()	rtnl_newlink_link_net(params)
#define nmv_newlink_tb()	(params->tb)
#define nmv_newlink_data()	(params->data)
#else
#define NMV_NEWLINK_ARGS struct net *src_net, struct net_device *dev, \
	struct nlattr *tb[], struct nlattr *data[], \
	struct netlink_ext_ack *extack
#define nmv_newlink_net()	(src_net)
#define nmv_newlink_tb()	(tb)
#define nmv_newlink_data()	(data)
#endif

/* class.namespace: what it returns, and whether it may change the device. */
#if defined(NMV_HAVE_CLASS_NS_COMMON)
#define NMV_CLASS_NS(name, d)	const struct ns_common *name(const struct device *d)
#define nmv_class_ns(net)	to_ns_common(net)
#elif defined(NMV_HAVE_CLASS_CONST_DEV)
#define NMV_CLASS_NS(name, d)	const void *name(const struct device *d)
#define nmv_class_ns(net)	(net)
#else
#define NMV_CLASS_NS(name, d)	const void *name(struct device *d)
#define nmv_class_ns(net)	(net)
#endif

/* Newer kernels ask whether ndo_fdb_* told of the change; we leave it to them. */
#ifdef NMV_HAVE_FDB_NOTIFIED
#define NMV_FDB_ARGS	bool *notified, struct netlink_ext_ack *extack
#else
#define NMV_FDB_ARGS	struct netlink_ext_ack *extack
#endif

/* A device that takes no lock around ndo_start_xmit. */
static inline void nmv_set_lltx(struct net_device *dev)
{
#ifdef NMV_HAVE_LLTX_BIT
	dev->lltx = true;
#else
	dev->features |= NETIF_F_LLTX;
#endif
}

/* Features that netdev_update_features() must find as they were. */
#ifdef NMV_HAVE_LLTX_BIT
#define NMV_F_STICKY	((netdev_features_t)0)
#else
#define NMV_F_STICKY	NETIF_F_LLTX
#endif

/* What NAPI threads are made and ended under, where RTNL is not enough. */
static inline bool nmv_netdev_trylock(struct net_device *dev)
{
#ifdef NMV_HAVE_NETDEV_LOCK
	return mutex_trylock(&dev->lock);
#else
	return true;
#endif
}

static inline void nmv_netdev_unlock(struct net_device *dev)
{
#ifdef NMV_HAVE_NETDEV_LOCK
	netdev_unlock(dev);
#endif
}

/* A net_device that no namespace has, for a NAPI instance to belong to. */
static inline struct net_device *nmv_dummy_alloc(void)
{
#ifdef NMV_HAVE_NETDEV_DUMMY
	return alloc_netdev_dummy(0);
#else
	struct net_device *dev = kzalloc(sizeof(*dev), GFP_KERNEL);

	if (dev)
		init_dummy_netdev(dev);
	return dev;
#endif
}

static inline void nmv_dummy_free(struct net_device *dev)
{
#ifdef NMV_HAVE_NETDEV_DUMMY
	free_netdev(dev);
#else
	kfree(dev);
#endif
}

/* Which NAPI instance serves the one receive queue, for "queue-get". */
static inline void nmv_rxq_set_napi(struct net_device *dev,
				    struct napi_struct *napi)
{
#ifdef NMV_HAVE_QUEUE_NAPI
	netif_queue_set_napi(dev, 0, NETDEV_QUEUE_TYPE_RX, napi);
#endif
}

#ifdef NMV_HAVE_RESIZE_BH
#define nmv_rings_resize	ptr_ring_resize_multiple_bh
#else
#define nmv_rings_resize	ptr_ring_resize_multiple
#endif

#endif
