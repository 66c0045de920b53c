// SPDX-License-Identifier: GPL-2.0
/*
 * The character device /dev/tap<ifindex>, and frames on their way into the
 * rings behind it. tap.ko does the device and the rings; here is what decides
 * whether a frame may try.
 */
#include <linux/cdev.h>
#include <linux/if_tun.h>
#include <linux/rtnetlink.h>
#include "nmv.h"
#include "nmv_compat.h"

static dev_t nmv_tap_major;
static struct cdev nmv_tap_cdev;

/* tap.ko tells us of a drop by a callback that does not say which frame. */
static DEFINE_PER_CPU(bool, nmv_late_drop);

static NMV_CLASS_NS(nmv_class_namespace, d)
{
	return nmv_class_ns(dev_net(to_net_dev(d->parent)));
}

static struct class nmv_tap_class = {
	.name		= "napi_macvtap",
	.ns_type	= &net_ns_type_operations,
	.namespace	= nmv_class_namespace,
};

static struct nmv_dev *nmv_tap_owner(struct tap_dev *tap)
{
	return &container_of(tap, struct nmv_tap_dev, tap.tap)->nd;
}

static void nmv_tap_tx_dropped(struct tap_dev *tap)
{
	/* Called by the sending task, bottom halves on. */
	local_bh_disable();
	nmv_count(nmv_tap_owner(tap), NMV_TX_DROPPED, 1);
	local_bh_enable();
}

static void nmv_tap_rx_dropped(struct tap_dev *tap)
{
	this_cpu_write(nmv_late_drop, true);
}

static void nmv_tap_update_features(struct tap_dev *tap,
				    netdev_features_t features)
{
	struct nmv_dev *nd = nmv_tap_owner(tap);

	nd->tap->rx_features = features;
	netdev_update_features(nd->dev);
}

/* The queue that tap.ko will choose for a frame, by the same order of rules. */
static struct tap_queue *nmv_tap_pick(struct tap_dev *tap, struct sk_buff *skb)
{
	u32 n = READ_ONCE(tap->numvtaps), by = 0;

	if (!n || n > MAX_TAP_QUEUES)
		return NULL;
	if (n > 1) {
		by = skb_get_hash(skb);
		if (!by && skb_rx_queue_recorded(skb))
			by = skb_get_rx_queue(skb);
	}
	return rcu_dereference(tap->taps[by % n]);
}

/* Places in the ring that a frame takes: more than one if tap.ko segments. */
static u32 nmv_tap_places(const struct tap_dev *tap, const struct tap_queue *q,
			  struct sk_buff *skb)
{
	netdev_features_t features = NETIF_F_GSO | NETIF_F_SG |
				     NETIF_F_FRAGLIST;

	if (!skb_is_gso(skb))
		return 1;
	if (READ_ONCE(q->flags) & IFF_VNET_HDR)
		features |= READ_ONCE(tap->tap_features);
	if (!netif_needs_gso(skb, features))
		return 1;
	return max_t(u32, skb_shinfo(skb)->gso_segs, 1);
}

/**
 * nmv_ring_room() - is there room in a ring, and note it
 * @r: ring
 * @places: places asked for
 * @slot: counters of its queue, or NULL
 * @early: only asking: a frame that finds room will ask again
 *
 * The consumer clears places from the last to the first of a batch, so all
 * between two free places are free or about to be.
 *
 * Context: bottom halves off.
 * Return: true if there is
 */
static bool nmv_ring_room(struct ptr_ring *r, u32 places,
			  struct nmv_tapq *slot, bool early)
{
	u32 at, last, size, head, used = 0;
	bool room = false;

	spin_lock(&r->producer_lock);
	at = r->producer;
	size = r->size;
	if (size) {
		places = min(places, size);
		last = at + places - 1;
		if (last >= size)
			last -= size;
		head = READ_ONCE(r->consumer_head);
		used = at >= head ? at - head : at + size - head;
		if (!used && READ_ONCE(r->queue[at]))
			used = size;
		room = !READ_ONCE(r->queue[at]) && !READ_ONCE(r->queue[last]);
	}
	if (slot && !(early && room)) {
		slot->received++;
		if (room)
			used = min(used + places, size);
		else
			slot->dropped++;
		if (used > slot->ring_high_water)
			slot->ring_high_water = used;
	}
	spin_unlock(&r->producer_lock);
	return room;
}

static struct nmv_tapq *nmv_tap_slot(struct nmv_tap *t, struct tap_queue *q)
{
	struct nmv_tapq *slot = nmv_tapq_find(t, q);

	if (unlikely(!slot))
		schedule_work(&t->scan);
	return slot;
}

/**
 * nmv_tap_early_drop() - is a frame for a guest lost already
 * @nd: device, of kind napi_macvtap
 * @skb: frame; stays the caller's
 *
 * Asked before a frame is copied or queued on its way to the ring. Counts the
 * drop when there is one.
 *
 * Context: bottom halves off, RCU read side.
 * Return: true if it is lost
 */
bool nmv_tap_early_drop(struct nmv_dev *nd, struct sk_buff *skb)
{
	struct nmv_tap *t = nd->tap;
	struct tap_queue *q = nmv_tap_pick(&t->tap, skb);

	if (!q) {
		nmv_count(nd, NMV_RX_DROPPED_NO_QUEUE, 1);
		return true;
	}
	if (nmv_ring_room(&q->ring, 1, nmv_tap_slot(t, q), true))
		return false;
	nmv_count(nd, NMV_RX_DROPPED_RING_FULL, 1);
	return true;
}

/* tap.ko dropped a frame that we had found room for. */
static void nmv_tap_count_late(struct nmv_dev *nd, struct tap_queue *q,
			       struct nmv_tapq *slot)
{
	bool full = ptr_ring_full(&q->ring);

	nmv_count(nd, full ? NMV_RX_DROPPED_RING_FULL : NMV_RX_DROPPED_OTHER,
		  1);
	if (slot)
		atomic64_inc(&slot->late_dropped);
}

/**
 * nmv_tap_receive() - receive handler of our own device: into the ring
 * @pskb: frame; the data begin after the Ethernet header
 *
 * Never passes a frame on: it was for the guest, not for the host's stack.
 *
 * Context: bottom halves off, RCU read side.
 * Return: RX_HANDLER_CONSUMED, but for what the host loops back to itself
 */
rx_handler_result_t nmv_tap_receive(struct sk_buff **pskb)
{
	struct sk_buff *skb = *pskb;
	struct tap_dev *tap = rcu_dereference(skb->dev->rx_handler_data);
	struct nmv_dev *nd = nmv_tap_owner(tap);
	unsigned int len = skb->len + ETH_HLEN;
	struct nmv_tapq *slot;
	struct tap_queue *q;

	/* Sent to itself by the host's stack: no Ethernet header. */
	if (unlikely(skb->pkt_type == PACKET_LOOPBACK))
		return RX_HANDLER_PASS;
	q = nmv_tap_pick(tap, skb);
	if (unlikely(!q)) {
		nmv_count(nd, NMV_RX_DROPPED_NO_QUEUE, 1);
		goto drop;
	}
	slot = nmv_tap_slot(nd->tap, q);
	if (!nmv_ring_room(&q->ring, nmv_tap_places(tap, q, skb), slot,
			   false)) {
		nmv_count(nd, NMV_RX_DROPPED_RING_FULL, 1);
		goto drop;
	}

	/* A guest may not read for long; nobody who sends to it, or to others
	 * through the same socket, shall wait for that.
	 */
	skb_orphan(skb);
	__this_cpu_write(nmv_late_drop, false);
	if (unlikely(tap_handle_frame(pskb) == RX_HANDLER_PASS)) {
		/* The queue was closed between the two looks. */
		nmv_count(nd, NMV_RX_DROPPED_NO_QUEUE, 1);
		if (slot)
			atomic64_inc(&slot->late_dropped);
		skb = *pskb;
		goto drop;
	}
	if (unlikely(__this_cpu_read(nmv_late_drop))) {
		nmv_tap_count_late(nd, q, slot);
	} else {
		nmv_count(nd, NMV_RX_DELIVERED, 1);
		nmv_count(nd, NMV_RX_BYTES, len);
	}
	return RX_HANDLER_CONSUMED;

drop:
	kfree_skb(skb);
	return RX_HANDLER_CONSUMED;
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
	kfree_skb(ptr);
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
