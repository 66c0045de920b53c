// SPDX-License-Identifier: GPL-2.0
/*
 * The own queue of a device: bounded, filled by siblings and by multicast,
 * emptied by the device's own NAPI instance. With
 * /sys/class/net/DEVICE/threaded at 1 that is the kernel thread
 * napi/DEVICE-ID; otherwise it runs in the SoftIRQ of the CPU that filled it.
 */
#include "nmv.h"
#include "nmv_compat.h"

/**
 * nmv_queue_admits() - is there room for one more frame
 * @waiting: frames that wait, or bytes
 * @limit: most that may; with bytes the last frame may exceed it
 *
 * Return: true if there is
 */
bool nmv_queue_admits(u32 waiting, u32 limit)
{
	return waiting < limit;
}

/**
 * nmv_queue_admits_multicast() - may one more multicast frame wait
 * @waiting: multicast frames that wait, or bytes
 * @limit: most of any kind that may
 *
 * Half of the queue: everybody on the lower device can send broadcasts, and a
 * flood of them must not push out what siblings send to this device alone.
 */
bool nmv_queue_admits_multicast(u32 waiting, u32 limit)
{
	return waiting < max(limit / 2, 1U);
}

static bool nmv_is_multicast(const struct sk_buff *skb)
{
	return skb->pkt_type == PACKET_BROADCAST ||
	       skb->pkt_type == PACKET_MULTICAST;
}

/**
 * nmv_queue_delivered() - count a frame that the stack is about to get
 * @nd: device, of kind napi_macvlan
 * @skb: frame; the data begin after the Ethernet header
 */
void nmv_queue_delivered(struct nmv_dev *nd, const struct sk_buff *skb)
{
	nmv_count_frame(nd, NMV_RX_DELIVERED, NMV_RX_BYTES,
			skb->len + ETH_HLEN);
}

/*
 * Why no more frame may wait, as the counter of that; NMV_STATS if one may. A
 * guest sends frames of 64 KiB, and the length of the queue is its owner's to
 * set, so the memory has a bound of its own.
 *
 * Exact under the lock of the frames; a guess without.
 */
static enum nmv_stat nmv_queue_refuses(const struct nmv_queue *q,
				       bool multicast)
{
	u32 limit = READ_ONCE(q->limit);

	if (!nmv_queue_admits(skb_queue_len_lockless(&q->frames), limit) ||
	    (multicast &&
	     !nmv_queue_admits_multicast(READ_ONCE(q->multicast), limit)))
		return NMV_RX_DROPPED_QUEUE_FULL;
	if (!nmv_queue_admits(READ_ONCE(q->bytes), NMV_QUEUE_BYTES) ||
	    (multicast &&
	     !nmv_queue_admits_multicast(READ_ONCE(q->multicast_bytes),
					 NMV_QUEUE_BYTES)))
		return NMV_RX_DROPPED_QUEUE_BYTES;
	return NMV_STATS;
}

/*
 * Up to @most frames at once. Frames in process hold no place: the bound is on
 * those that wait.
 */
static int nmv_queue_take(struct nmv_queue *q, struct list_head *taken,
			  int most)
{
	struct sk_buff *skb;
	int n = 0;

	spin_lock(&q->frames.lock);
	while (n < most && (skb = __skb_dequeue(&q->frames))) {
		WRITE_ONCE(q->bytes, q->bytes - skb->truesize);
		if (nmv_is_multicast(skb)) {
			WRITE_ONCE(q->multicast, q->multicast - 1);
			WRITE_ONCE(q->multicast_bytes,
				   q->multicast_bytes - skb->truesize);
		}
		list_add_tail(&skb->list, taken);
		n++;
	}
	spin_unlock(&q->frames.lock);
	return n;
}

static int nmv_queue_poll(struct napi_struct *napi, int budget)
{
	struct nmv_dev *nd = container_of(napi, struct nmv_dev, queue.napi);
	struct sk_buff *skb;
	LIST_HEAD(taken);
	int done;

	done = nmv_queue_take(&nd->queue, &taken, budget);
	if (!nd->tap)
		list_for_each_entry(skb, &taken, list)
			nmv_queue_delivered(nd, skb);
	netif_receive_skb_list(&taken);
	if (done < budget)
		napi_complete_done(napi, done);
	return done;
}

/* The frame is ours and ready for netif_receive_skb(). */
static void nmv_queue_add(struct nmv_dev *nd, struct sk_buff *skb)
{
	struct nmv_queue *q = &nd->queue;
	bool multicast = nmv_is_multicast(skb);
	enum nmv_stat refused;

	/* What waits here must not hold back its sender's socket. */
	skb_orphan(skb);
	spin_lock(&q->frames.lock);
	refused = nmv_queue_refuses(q, multicast);
	if (refused == NMV_STATS) {
		__skb_queue_tail(&q->frames, skb);
		WRITE_ONCE(q->bytes, q->bytes + skb->truesize);
		if (multicast) {
			WRITE_ONCE(q->multicast, q->multicast + 1);
			WRITE_ONCE(q->multicast_bytes,
				   q->multicast_bytes + skb->truesize);
		}
		if (skb_queue_len(&q->frames) > q->high_water)
			WRITE_ONCE(q->high_water, skb_queue_len(&q->frames));
	}
	spin_unlock(&q->frames.lock);
	if (refused != NMV_STATS) {
		nmv_count(nd, refused, 1);
		kfree_skb_reason(skb, SKB_DROP_REASON_FULL_RING);
		return;
	}
	napi_schedule(&q->napi);
}

/*
 * Make a frame that a sibling sends one that a device receives. False: it was
 * dropped, and counted.
 */
static bool nmv_queue_turn(struct nmv_dev *nd, struct sk_buff *skb)
{
	/* Asked here so that it is counted once, by us. */
	if (unlikely(!is_skb_forwardable(nd->dev, skb))) {
		bool up = nd->dev->flags & IFF_UP;

		nmv_count(nd, up ? NMV_RX_DROPPED_OTHER : NMV_RX_DROPPED_DOWN,
			  1);
		kfree_skb_reason(skb, up ? SKB_DROP_REASON_PKT_TOO_BIG :
					   SKB_DROP_REASON_DEV_READY);
		return false;
	}
	if (unlikely(__dev_forward_skb(nd->dev, skb))) {
		nmv_count(nd, NMV_RX_DROPPED_OTHER, 1);
		return false;
	}
	return true;
}

/* Known before anything is copied; false also counts the drop and says why. */
static bool nmv_queue_wants(struct nmv_dev *nd, struct sk_buff *skb,
			    enum nmv_stat origin, enum skb_drop_reason *reason)
{
	enum nmv_stat refused;

	nmv_count_frame(nd, NMV_RX_RECEIVED, origin, 1);
	if (nd->tap && nmv_tap_early_drop(nd, skb, reason))
		return false;
	*reason = SKB_DROP_REASON_FULL_RING;
	refused = nmv_queue_refuses(&nd->queue, origin == NMV_RX_BROADCAST);
	if (refused == NMV_STATS)
		return true;
	nmv_count(nd, refused, 1);
	return false;
}

/**
 * nmv_queue_offer() - a sibling sends a frame to a device
 * @nd: receiver
 * @skb: frame, beginning with its Ethernet header; consumed
 *
 * Context: bottom halves off, RCU read side.
 */
void nmv_queue_offer(struct nmv_dev *nd, struct sk_buff *skb)
{
	enum skb_drop_reason reason;

	if (!nmv_queue_wants(nd, skb, NMV_RX_FORWARDED, &reason)) {
		kfree_skb_reason(skb, reason);
		return;
	}
	if (nmv_queue_turn(nd, skb))
		nmv_queue_add(nd, skb);
}

/**
 * nmv_queue_offer_copy() - multicast for a device
 * @nd: receiver; may not be listening
 * @skb: frame, kept by the caller
 * @from_sibling: it is being sent, so it begins with its Ethernet header;
 *	else it was received, so that header was pulled
 *
 * Context: bottom halves off, RCU read side.
 */
void nmv_queue_offer_copy(struct nmv_dev *nd, struct sk_buff *skb,
			  bool from_sibling)
{
	const struct ethhdr *eth = eth_hdr(skb);
	enum skb_drop_reason unused;
	struct sk_buff *copy;

	if (!test_bit(nmv_hash_mc(eth->h_dest), nd->mc_filter))
		return;
	/* Nothing is freed that could have a reason: there is no copy yet. */
	if (!nmv_queue_wants(nd, skb, NMV_RX_BROADCAST, &unused))
		return;
	copy = skb_clone(skb, GFP_ATOMIC);
	if (!copy) {
		nmv_count(nd, NMV_RX_DROPPED_OTHER, 1);
		return;
	}
	if (from_sibling) {
		if (!nmv_queue_turn(nd, copy))
			return;
	} else {
		copy->dev = nd->dev;
		copy->pkt_type = is_broadcast_ether_addr(eth->h_dest) ?
				 PACKET_BROADCAST : PACKET_MULTICAST;
	}
	nmv_count(nd, NMV_RX_MULTICAST, 1);
	nmv_queue_add(nd, copy);
}

/**
 * nmv_queue_init() - before the device is registered
 * @nd: device
 *
 * From now on the NAPI instance is enabled, also while the device is down:
 * kernels that end its thread when "threaded" becomes 0 wait, with the lock of
 * the device, until an instance is idle or polled, and a disabled one is
 * neither.
 */
void nmv_queue_init(struct nmv_dev *nd)
{
	skb_queue_head_init(&nd->queue.frames);
	netif_napi_add(nd->dev, &nd->queue.napi, nmv_queue_poll);
	nmv_rxq_set_napi(nd->dev, &nd->queue.napi);
	napi_enable(&nd->queue.napi);
}

/**
 * nmv_queue_exit() - when the device is unregistered
 * @nd: device; down
 *
 * Context: RTNL.
 */
void nmv_queue_exit(struct nmv_dev *nd)
{
	napi_disable(&nd->queue.napi);
	nmv_rxq_set_napi(nd->dev, NULL);
	netif_napi_del(&nd->queue.napi);
}

/**
 * nmv_queue_stop() - the device goes down; nobody adds frames any more
 * @nd: device
 *
 * When it returns no frame is on its way from the queue.
 */
void nmv_queue_stop(struct nmv_dev *nd)
{
	struct nmv_queue *q = &nd->queue;
	struct sk_buff_head left;

	__skb_queue_head_init(&left);
	spin_lock_bh(&q->frames.lock);
	nmv_count(nd, NMV_RX_DROPPED_DOWN, skb_queue_len(&q->frames));
	skb_queue_splice_init(&q->frames, &left);
	WRITE_ONCE(q->bytes, 0);
	WRITE_ONCE(q->multicast, 0);
	WRITE_ONCE(q->multicast_bytes, 0);
	spin_unlock_bh(&q->frames.lock);
	__skb_queue_purge(&left);
	/* What a poll has taken it hands on with bottom halves off. To wait for
	 * the instance to be idle would hold RTNL for as long as somebody polls
	 * it ("threaded" busy-poll, from 6.19 on for ever).
	 */
	synchronize_net();
}
