// SPDX-License-Identifier: GPL-2.0
/*
 * The character device /dev/tap<ifindex>: tap.ko does it, and the rings behind
 * it. Here is what ties it to a network device of ours.
 */
#include <linux/cdev.h>
#include <linux/rtnetlink.h>
#include "nmv.h"
#include "nmv_compat.h"

static dev_t nmv_tap_major;
static struct cdev nmv_tap_cdev;

static NMV_CLASS_NS(nmv_class_namespace, d)
{
	return nmv_class_ns(dev_net(to_net_dev(d->parent)));
}

static struct class nmv_tap_class = {
	.name		= "napi_macvtap",
	.ns_type	= &net_ns_type_operations,
	.namespace	= nmv_class_namespace,
};

static void nmv_tap_tx_dropped(struct tap_dev *tap)
{
	/* Called by the sending task, bottom halves on. */
	local_bh_disable();
	nmv_count(nmv_tap_owner(tap), NMV_TX_DROPPED, 1);
	local_bh_enable();
}

static void nmv_tap_update_features(struct tap_dev *tap,
				    netdev_features_t features)
{
	struct nmv_dev *nd = nmv_tap_owner(tap);

	nd->tap->rx_features = features;
	netdev_update_features(nd->dev);
}

/**
 * nmv_tap_attach() - before the device is registered
 * @nd: device, of kind napi_macvtap
 *
 * Return: 0 or an errno
 */
int nmv_tap_attach(struct nmv_dev *nd)
{
	struct tap_dev *tap = &nd->tap->tap;

	INIT_LIST_HEAD(&tap->queue_list);
	tap->dev = nd->dev;
	tap->tap_features = NETIF_F_HW_CSUM | NETIF_F_TSO | NETIF_F_TSO_ECN |
			    NETIF_F_TSO6;
	tap->count_tx_dropped = nmv_tap_tx_dropped;
	tap->count_rx_dropped = nmv_tap_rx_dropped;
	tap->update_features = nmv_tap_update_features;
	nd->tap->rx_features = ~(netdev_features_t)0;
	nmv_tapq_init(nd->tap);
	return netdev_rx_handler_register(nd->dev, nmv_tap_receive, tap);
}

/**
 * nmv_tap_detach() - after the device went down for the last time
 * @nd: device, of kind napi_macvtap
 *
 * Files that are still open keep their queues, which lead nowhere from now on.
 */
void nmv_tap_detach(struct nmv_dev *nd)
{
	netdev_rx_handler_unregister(nd->dev);
	tap_del_queues(&nd->tap->tap);
	/* A task in sendmsg may still hold the device that it read before. */
	synchronize_net();
	nmv_tapq_exit(nd->tap);
}

/* Frames that the resize under way has discarded; under RTNL. */
static unsigned int nmv_discarded;

static void nmv_discard(void *ptr)
{
	nmv_discarded++;
	kfree_skb_reason(ptr, SKB_DROP_REASON_FULL_RING);
}

/* As tap_queue_resize(), which does not tell what it throws away. */
static int nmv_tap_resize(struct nmv_dev *nd)
{
	struct tap_dev *tap = &nd->tap->tap;
	struct ptr_ring **rings;
	struct tap_queue *q;
	int err, n = 0;

	if (!tap->numqueues)
		return 0;
	rings = kcalloc(tap->numqueues, sizeof(*rings), GFP_KERNEL);
	if (!rings)
		return -ENOMEM;
	list_for_each_entry(q, &tap->queue_list, next)
		rings[n++] = &q->ring;
	nmv_discarded = 0;
	err = nmv_rings_resize(rings, n, nd->dev->tx_queue_len, GFP_KERNEL,
			       nmv_discard);
	kfree(rings);
	local_bh_disable();
	nmv_count(nd, NMV_RX_DROPPED_SHRINK, nmv_discarded);
	local_bh_enable();
	return err;
}

static int nmv_tap_node(struct nmv_dev *nd)
{
	struct tap_dev *tap = &nd->tap->tap;
	char name[IFNAMSIZ];
	struct device *node;
	int err;

	err = tap_get_minor(nmv_tap_major, tap);
	if (err)
		return err;
	snprintf(name, sizeof(name), "tap%d", nd->dev->ifindex);
	node = device_create(&nmv_tap_class, &nd->dev->dev,
			     MKDEV(MAJOR(nmv_tap_major), tap->minor), nd->dev,
			     "%s", name);
	if (IS_ERR(node)) {
		tap_free_minor(nmv_tap_major, tap);
		return PTR_ERR(node);
	}
	return sysfs_create_link(&nd->dev->dev.kobj, &node->kobj, name);
}

static void nmv_tap_unnode(struct nmv_dev *nd)
{
	struct tap_dev *tap = &nd->tap->tap;
	char name[IFNAMSIZ];

	if (!tap->minor)
		return;
	snprintf(name, sizeof(name), "tap%d", nd->dev->ifindex);
	sysfs_remove_link(&nd->dev->dev.kobj, name);
	device_destroy(&nmv_tap_class, MKDEV(MAJOR(nmv_tap_major), tap->minor));
	tap_free_minor(nmv_tap_major, tap);
}

static int nmv_tap_event(struct notifier_block *unused, unsigned long event,
			 void *ptr)
{
	struct net_device *dev = netdev_notifier_info_to_dev(ptr);
	struct nmv_dev *nd = netdev_priv(dev);

	if (dev->rtnl_link_ops != &nmv_tap_ops)
		return NOTIFY_DONE;
	switch (event) {
	/* A move to another namespace is one and then the other. */
	case NETDEV_REGISTER:
		return notifier_from_errno(nmv_tap_node(nd));
	case NETDEV_UNREGISTER:
		nmv_tap_unnode(nd);
		break;
	case NETDEV_CHANGE_TX_QUEUE_LEN:
		/* Its frames count against no socket. */
		if (nd->dev->tx_queue_len > NMV_QUEUE_LEN_MAX)
			return notifier_from_errno(-EINVAL);
		return notifier_from_errno(nmv_tap_resize(nd));
	}
	return NOTIFY_DONE;
}

struct notifier_block nmv_tap_notifier = {
	.notifier_call	= nmv_tap_event,
};

/**
 * nmv_tap_register() - the character device region and its class
 *
 * An open file holds this module through the region's owner.
 *
 * Return: 0 or an errno
 */
int nmv_tap_register(void)
{
	int err;

	err = tap_create_cdev(&nmv_tap_cdev, &nmv_tap_major, "napi_macvtap",
			      THIS_MODULE);
	if (err)
		return err;
	err = class_register(&nmv_tap_class);
	if (err)
		tap_destroy_cdev(nmv_tap_major, &nmv_tap_cdev);
	return err;
}

void nmv_tap_unregister(void)
{
	class_unregister(&nmv_tap_class);
	tap_destroy_cdev(nmv_tap_major, &nmv_tap_cdev);
}
