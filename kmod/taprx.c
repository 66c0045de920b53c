// SPDX-License-Identifier: GPL-2.0
/*
 * Frames on their way into the rings behind /dev/tap<ifindex>. tap.ko does the
 * rings; here is what decides whether a frame may try, and which queues get it.
 *
 * Several guests may be one router (Parallel Virtual Routers): each has opened
 * one queue of the device and all have its MAC. What they have to learn of
 * their neighbours must reach each of them, and the flow hash gives it to one.
 * So with IFLA_NAPI_MACVLAN_EVERY_QUEUE such frames go to every queue, and what
 * is for a queue that nobody reads goes to one that somebody does.
 */
#include <linux/icmpv6.h>
#include <linux/if_tun.h>
#include <linux/if_vlan.h>
#include <linux/ip.h>
#include <linux/rtnetlink.h>
#include <net/dsfield.h>
#include <net/ipv6.h>
#include <net/ndisc.h>
#include "nmv.h"

/* tap.ko tells us of a drop by a callback that does not say which frame. */
static DEFINE_PER_CPU(bool, nmv_late_drop);

void nmv_tap_rx_dropped(struct tap_dev *tap)
{
	this_cpu_write(nmv_late_drop, true);
}

/* May a frame have to go to more than one queue. */
static bool nmv_tap_shared(const struct nmv_tap *t)
{
	return READ_ONCE(t->every_queue) && READ_ONCE(t->tap.numvtaps) > 1;
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

/* Of what a guest sent nobody has counted the segments. */
static u32 nmv_tap_segments(const struct sk_buff *skb)
{
	if (!skb_is_gso(skb))
		return 1;
	return skb_shinfo(skb)->gso_segs ?:
	       DIV_ROUND_UP(skb->len, skb_shinfo(skb)->gso_size);
}

/**
 * nmv_tap_places() - places in a ring that a frame takes
 * @tap: device
 * @q: queue
 * @skb: frame
 *
 * Return: more than one if tap.ko makes segments of it
 */
u32 nmv_tap_places(const struct tap_dev *tap, const struct tap_queue *q,
		   struct sk_buff *skb)
{
	netdev_features_t features = NETIF_F_GSO | NETIF_F_SG |
				     NETIF_F_FRAGLIST;

	if (!skb_is_gso(skb))
		return 1;
	if (READ_ONCE(q->flags) & IFF_VNET_HDR)
		features |= READ_ONCE(tap->tap_features);
	/* It stays whole for a guest that takes large frames itself. */
	if (!netif_needs_gso(skb, features | NETIF_F_GSO_ROBUST))
		return 1;
	return nmv_tap_segments(skb);
}

/**
 * nmv_ring_used() - how many frames wait in a ring, roughly
 * @r: ring
 * @head: set to the place from which the next one is taken
 *
 * Context: under the producer lock.
 * Return: frames
 */
u32 nmv_ring_used(const struct ptr_ring *r, u32 *head)
{
	u32 at = r->producer, size = r->size;

	*head = READ_ONCE(r->consumer_head);
	if (!size)
		return 0;
	if (at == *head)
		return READ_ONCE(r->queue[at]) ? size : 0;
	return at > *head ? at - *head : at + size - *head;
}

/*
 * See how full the ring is, and whether somebody reads it. That takes the
 * reader's cache line, so it is done once a tick, not for every frame.
 */
static void nmv_tapq_look(struct nmv_tapq *slot)
{
	struct ptr_ring *r = &slot->q->ring;
	u32 used, head;

	spin_lock(&r->producer_lock);
	WRITE_ONCE(slot->looked, jiffies);
	used = nmv_ring_used(r, &head);
	if (used > slot->ring_high_water)
		WRITE_ONCE(slot->ring_high_water, used);
	if (!used || head != slot->read_to) {
		slot->read_to = head;
		WRITE_ONCE(slot->read_at, jiffies);
	}
	spin_unlock(&r->producer_lock);
}

/*
 * A guest that hangs, or has not set up its interface yet, leaves frames in
 * the ring: the queue is stalled when that has lasted NMV_TAP_PATIENCE.
 */
static bool nmv_tapq_stalled(struct nmv_tapq *slot)
{
	if (READ_ONCE(slot->looked) != jiffies)
		nmv_tapq_look(slot);
	return time_after(jiffies, READ_ONCE(slot->read_at) + NMV_TAP_PATIENCE);
}

/**
 * nmv_tapq_read() - counters of an open queue
 * @slot: the queue
 * @s: filled in
 *
 * Context: bottom halves off; RCU read side, or RTNL.
 */
void nmv_tapq_read(struct nmv_tapq *slot, struct nmv_tapq_stats *s)
{
	const struct nmv_tapq_pcpu *p;
	u64 delivered, dropped;
	unsigned int start;
	int cpu;

	memset(s, 0, sizeof(*s));
	for_each_possible_cpu(cpu) {
		p = per_cpu_ptr(slot->counts, cpu);
		do {
			start = u64_stats_fetch_begin(&p->syncp);
			delivered = u64_stats_read(&p->delivered);
			dropped = u64_stats_read(&p->dropped);
		} while (u64_stats_fetch_retry(&p->syncp, start));
		s->delivered += delivered;
		s->dropped += dropped;
	}
	nmv_tapq_look(slot);
	s->high_water = READ_ONCE(slot->ring_high_water);
	s->stalled = nmv_tapq_stalled(slot);
}

/* What became of a frame for a queue. */
static void nmv_tapq_count(struct nmv_tapq *slot, bool dropped)
{
	struct nmv_tapq_pcpu *p = this_cpu_ptr(slot->counts);

	u64_stats_update_begin(&p->syncp);
	u64_stats_inc(dropped ? &p->dropped : &p->delivered);
	u64_stats_update_end(&p->syncp);
}

/**
 * nmv_ring_room() - is there room in a ring
 * @r: ring; one of size 0, which has no place to look at, never has
 * @places: places asked for; of more than an empty ring has free, all of these
 *
 * The consumer clears places from the last to the first of a batch, so all
 * between two free places are free or about to be. Until a batch is complete
 * an empty ring keeps what was read last.
 *
 * Context: bottom halves off.
 * Return: true if there is
 */
bool nmv_ring_room(struct ptr_ring *r, u32 places)
{
	bool room = false;
	u32 at, last;

	spin_lock(&r->producer_lock);
	if (r->size) {
		at = r->producer;
		last = at + min_t(u32, places, r->size - r->batch + 1) - 1;
		if (last >= r->size)
			last -= r->size;
		room = !READ_ONCE(r->queue[at]) && !READ_ONCE(r->queue[last]);
	}
	spin_unlock(&r->producer_lock);
	return room;
}

static struct nmv_tapq *nmv_tap_slot(struct nmv_tap *t, struct tap_queue *q)
{
	struct nmv_tapq *slot = nmv_tapq_find(t, q);

	if (unlikely(!slot))
		nmv_tapq_ask(t);
	return slot;
}

/*
 * Places that a frame has to leave to control frames: none before a frame was
 * lost, because to see the ring fill up takes the reader's cache line.
 */
static u32 nmv_tap_leaves(const struct nmv_tapq *slot,
			  const struct tap_queue *q, const struct sk_buff *skb)
{
	if (!slot ||
	    time_after_eq(jiffies, READ_ONCE(slot->full_at) + NMV_TAP_FULL) ||
	    nmv_is_control(skb))
		return 0;
	return min_t(u32, READ_ONCE(q->ring.size) / 8, NMV_TAP_RESERVE);
}

/* A frame for a queue found its ring full, and is lost. */
static void nmv_tap_full(struct nmv_dev *nd, struct nmv_tapq *slot)
{
	nmv_count(nd, NMV_RX_DROPPED_RING_FULL, 1);
	if (unlikely(!slot))
		return;
	nmv_tapq_count(slot, true);
	if (READ_ONCE(slot->full_at) == jiffies)
		return;
	WRITE_ONCE(slot->full_at, jiffies);
	/* The first time in this tick, perhaps, that it is full. */
	nmv_tapq_look(slot);
}

/**
 * nmv_tap_early_drop() - is a frame for a guest lost already
 * @nd: device, of kind napi_macvtap
 * @skb: frame; stays the caller's
 * @reason: set to why, if it is
 *
 * Asked before a frame is copied or queued on its way to the ring. Counts the
 * drop when there is one.
 *
 * Context: bottom halves off, RCU read side.
 * Return: true if it is lost
 */
bool nmv_tap_early_drop(struct nmv_dev *nd, struct sk_buff *skb,
			enum skb_drop_reason *reason)
{
	struct nmv_tap *t = nd->tap;
	struct nmv_tapq *slot;
	struct tap_queue *q;

	/* A full ring tells nothing of a frame that goes to all of them. */
	if (nmv_tap_shared(t))
		return false;
	/* From a sibling a tag is still in the frame, and the network header
	 * behind it: a hash would be of the length, and stay in the skb.
	 */
	if (READ_ONCE(t->tap.numvtaps) > 1 && eth_type_vlan(skb->protocol) &&
	    !skb_vlan_tag_present(skb))
		return false;
	q = nmv_tap_pick(&t->tap, skb);
	if (!q) {
		nmv_count(nd, NMV_RX_DROPPED_NO_QUEUE, 1);
		*reason = SKB_DROP_REASON_DEV_READY;
		return true;
	}
	slot = nmv_tap_slot(t, q);
	if (nmv_ring_room(&q->ring, 1 + nmv_tap_leaves(slot, q, skb)))
		return false;
	nmv_tap_full(nd, slot);
	*reason = SKB_DROP_REASON_FULL_RING;
	return true;
}

/*
 * One frame into one queue, which is the one that tap.ko will choose for it.
 * Consumes the frame and counts what became of it. Whether a frame finds room
 * is seen by putting it there; only one of several segments, and one that must
 * leave places to others, has to know before.
 */
static void nmv_tap_put(struct nmv_dev *nd, struct tap_queue *q,
			struct sk_buff *skb)
{
	struct nmv_tapq *slot = nmv_tap_slot(nd->tap, q);
	u32 places = nmv_tap_places(&nd->tap->tap, q, skb);
	u32 leaves = nmv_tap_leaves(slot, q, skb);
	bool sum = skb->ip_summed == CHECKSUM_PARTIAL;
	unsigned int len = skb->len + ETH_HLEN;

	/* A guest may ask for 64 KiB in single bytes, all made before the first
	 * of them goes into the ring. Whether tap.ko will make them, the reader
	 * may have changed before it looks.
	 */
	if (unlikely(nmv_tap_segments(skb) > NMV_TAP_SEGMENTS)) {
		nmv_count(nd, NMV_RX_DROPPED_OTHER, 1);
		kfree_skb_reason(skb, SKB_DROP_REASON_SKB_GSO_SEG);
		return;
	}

	if (slot && READ_ONCE(slot->looked) != jiffies)
		nmv_tapq_look(slot);
	if (unlikely(places + leaves > 1) &&
	    !nmv_ring_room(&q->ring, places + leaves)) {
		nmv_tap_full(nd, slot);
		kfree_skb_reason(skb, SKB_DROP_REASON_FULL_RING);
		return;
	}

	/* A guest may not read for long; nobody who sends to it, or to others
	 * through the same socket, shall wait for that.
	 */
	skb_orphan(skb);
	__this_cpu_write(nmv_late_drop, false);
	if (unlikely(tap_handle_frame(&skb) == RX_HANDLER_PASS)) {
		/* The queue was closed between the two looks. */
		nmv_count(nd, NMV_RX_DROPPED_NO_QUEUE, 1);
		kfree_skb_reason(skb, SKB_DROP_REASON_DEV_READY);
	} else if (unlikely(__this_cpu_read(nmv_late_drop))) {
		/* A frame without segments or sum to make lacks but room. */
		if ((places > 1 || sum) && nmv_ring_room(&q->ring, 1))
			nmv_count(nd, NMV_RX_DROPPED_OTHER, 1);
		else
			nmv_tap_full(nd, slot);
	} else {
		if (likely(slot))
			nmv_tapq_count(slot, false);
		nmv_count_frame(nd, NMV_RX_DELIVERED, NMV_RX_BYTES, len);
	}
}

/*
 * Protocol of a frame, and where its header begins. A VLAN tag is still in what
 * a sibling sends; the stack takes the first one out of what a device receives.
 */
static __be16 nmv_protocol(const struct sk_buff *skb, int *at)
{
	const struct vlan_hdr *tag;
	struct vlan_hdr room;

	*at = skb_network_offset(skb);
	if (likely(!eth_type_vlan(skb->protocol)) || skb_vlan_tag_present(skb))
		return skb->protocol;
	*at = skb_mac_offset(skb) + ETH_HLEN;
	tag = skb_header_pointer(skb, *at, sizeof(room), &room);
	*at += VLAN_HLEN;
	return tag ? tag->h_vlan_encapsulated_proto : skb->protocol;
}

/**
 * nmv_is_discovery() - does a unicast frame tell of a neighbour
 * @skb: frame; what a sibling sends may begin with its Ethernet header
 *
 * ARP, and the messages of IPv6 neighbour discovery, 133 to 137. RFC 6980 and
 * common practice leave them without extension headers, so none are skipped.
 *
 * Return: true if it does
 */
bool nmv_is_discovery(const struct sk_buff *skb)
{
	const struct ipv6hdr *ip6;
	struct ipv6hdr ip6_room;
	const u8 *type;
	u8 type_room;
	__be16 proto;
	int at;

	proto = nmv_protocol(skb, &at);
	if (proto == htons(ETH_P_ARP))
		return true;
	if (proto != htons(ETH_P_IPV6))
		return false;
	ip6 = skb_header_pointer(skb, at, sizeof(ip6_room), &ip6_room);
	if (!ip6 || ip6->nexthdr != IPPROTO_ICMPV6)
		return false;
	type = skb_header_pointer(skb, at + sizeof(*ip6), sizeof(type_room),
				  &type_room);
	return type && *type >= NDISC_ROUTER_SOLICITATION &&
	       *type <= NDISC_REDIRECT;
}

/**
 * nmv_is_control() - does a frame hold networks together
 * @skb: frame; what a sibling sends may begin with its Ethernet header
 *
 * What tells of neighbours, IEEE 802.2 (IS-IS, spanning tree), and IP of the
 * classes 6 and 7, which routing daemons give their own packets (RFC 4594, 3.1).
 * A guest's frame of 802.2 has its length where others have a protocol.
 * Any sender can: who sends everything so is where he was without the classes.
 *
 * Return: true if it does
 */
bool nmv_is_control(const struct sk_buff *skb)
{
	const struct ipv6hdr *ip6;
	struct ipv6hdr ip6_room;
	const struct iphdr *ip4;
	struct iphdr ip4_room;
	__be16 proto;
	int at;

	proto = nmv_protocol(skb, &at);
	switch (proto) {
	case htons(ETH_P_IP):
		ip4 = skb_header_pointer(skb, at, sizeof(ip4_room), &ip4_room);
		return ip4 && ip4->tos >= IPTOS_PREC_INTERNETCONTROL;
	case htons(ETH_P_IPV6):
		ip6 = skb_header_pointer(skb, at, sizeof(ip6_room), &ip6_room);
		if (ip6 && ipv6_get_dsfield(ip6) >= IPTOS_PREC_INTERNETCONTROL)
			return true;
		return nmv_is_discovery(skb);
	case htons(ETH_P_ARP):
		return true;
	}
	return !eth_proto_is_802_3(proto);
}

/*
 * A copy for each open queue but the last, which gets the frame itself. tap.ko
 * takes the hash modulo the number of queues. A queue that closes meanwhile
 * gives its number to the last one, which may so miss the frame or get it
 * twice: who asks for a neighbour asks again.
 */
static void nmv_tap_put_all(struct nmv_dev *nd, struct sk_buff *skb)
{
	struct tap_dev *tap = &nd->tap->tap;
	u32 i, n = min_t(u32, READ_ONCE(tap->numvtaps), MAX_TAP_QUEUES);
	struct tap_queue *q, *last = NULL;
	struct sk_buff *copy;
	u32 last_at = 0;

	for (i = 0; i < n; i++) {
		q = rcu_dereference(tap->taps[i]);
		if (!q)
			continue;
		if (last) {
			nmv_count(nd, NMV_RX_RECEIVED, 1);
			nmv_count(nd, NMV_RX_COPIED, 1);
			copy = skb_clone(skb, GFP_ATOMIC);
			if (likely(copy)) {
				__skb_set_sw_hash(copy, n + last_at, false);
				nmv_tap_put(nd, last, copy);
			} else {
				nmv_count(nd, NMV_RX_DROPPED_OTHER, 1);
			}
		}
		last = q;
		last_at = i;
	}
	if (unlikely(!last)) {
		nmv_count(nd, NMV_RX_DROPPED_NO_QUEUE, 1);
		kfree_skb_reason(skb, SKB_DROP_REASON_DEV_READY);
		return;
	}
	__skb_set_sw_hash(skb, n + last_at, false);
	nmv_tap_put(nd, last, skb);
}

/*
 * Of several guests that are one router, one may not read: its frames go to
 * the others, by what is left of the hash, and are its own again when it does.
 * When nobody reads, they are lost where they belong.
 */
static struct tap_queue *nmv_tap_reader(struct nmv_dev *nd,
					struct tap_queue *q,
					struct sk_buff *skb)
{
	struct nmv_tapq *slot = nmv_tap_slot(nd->tap, q);
	struct tap_dev *tap = &nd->tap->tap;
	u32 n = READ_ONCE(tap->numvtaps), at = READ_ONCE(q->queue_index);
	u32 i, first, other_at;
	struct tap_queue *other;

	if (!slot || n < 2 || n > MAX_TAP_QUEUES || !nmv_tapq_stalled(slot))
		return q;
	first = skb_get_hash(skb) / n;
	for (i = 0; i < n - 1; i++) {
		other_at = (at + 1 + (first + i) % (n - 1)) % n;
		other = rcu_dereference(tap->taps[other_at]);
		slot = other ? nmv_tap_slot(nd->tap, other) : NULL;
		if (!slot || nmv_tapq_stalled(slot))
			continue;
		nmv_count(nd, NMV_RX_DIVERTED, 1);
		__skb_set_sw_hash(skb, n + other_at, false);
		return other;
	}
	return q;
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
	struct tap_queue *q;

	/* Sent to itself by the host's stack: no Ethernet header. */
	if (unlikely(skb->pkt_type == PACKET_LOOPBACK))
		return RX_HANDLER_PASS;
	if (nmv_tap_shared(nd->tap) &&
	    (is_multicast_ether_addr(eth_hdr(skb)->h_dest) ||
	     nmv_is_discovery(skb))) {
		nmv_tap_put_all(nd, skb);
		return RX_HANDLER_CONSUMED;
	}
	q = nmv_tap_pick(tap, skb);
	if (unlikely(!q)) {
		nmv_count(nd, NMV_RX_DROPPED_NO_QUEUE, 1);
		kfree_skb_reason(skb, SKB_DROP_REASON_DEV_READY);
		return RX_HANDLER_CONSUMED;
	}
	if (nmv_tap_shared(nd->tap))
		q = nmv_tap_reader(nd, q, skb);
	nmv_tap_put(nd, q, skb);
	return RX_HANDLER_CONSUMED;
}
