// SPDX-License-Identifier: GPL-2.0
/*
 * Broadcast and multicast from the NIC. With hundreds of devices on it each
 * such frame is hundreds of copies, too many for the SoftIRQ that polls the
 * NIC. So a frame waits in a bounded queue of its port, whose NAPI instance
 * makes as many copies in a poll as others handle frames, and goes on in
 * the next one where it ended.
 */
#include <linux/rtnetlink.h>
#include "nmv.h"
#include "nmv_compat.h"

static struct sk_buff *nmv_bcast_take(struct nmv_bcast *b)
{
	struct sk_buff *skb;

	spin_lock(&b->frames.lock);
	skb = __skb_dequeue(&b->frames);
	if (skb)
		WRITE_ONCE(b->bytes, b->bytes - skb->truesize);
	spin_unlock(&b->frames.lock);
	return skb;
}

static struct nmv_dev *nmv_bcast_after(struct nmv_port *port,
				       struct nmv_dev *nd)
{
	return list_next_or_null_rcu(&port->devs, &nd->in_port, struct nmv_dev,
				     in_port);
}

/* Copies of the frame in hand, for at most so many devices; for how many. */
static int nmv_bcast_copy(struct nmv_port *port, int most)
{
	struct nmv_bcast *b = &port->bcast;
	const struct nmv_dev *src = nmv_port_find(port,
						  eth_hdr(b->skb)->h_source);
	u32 mode = src ? READ_ONCE(src->mode) : 0;
	int done = 0;

	while (b->next && done < most) {
		if (nmv_hears_nic_multicast(src, src == b->next, mode,
					    READ_ONCE(b->next->mode)))
			nmv_queue_offer_copy(b->next, b->skb, false);
		b->next = nmv_bcast_after(port, b->next);
		done++;
	}
	return done;
}

static int nmv_bcast_poll(struct napi_struct *napi, int budget)
{
	struct nmv_port *port = container_of(napi, struct nmv_port, bcast.napi);
	struct nmv_bcast *b = &port->bcast;
	int done = 0;

	rcu_read_lock();
	spin_lock(&b->lock);
	while (done < budget) {
		if (!b->next) {
			consume_skb(b->skb);
			b->skb = nmv_bcast_take(b);
			if (!b->skb)
				break;
			b->next = list_first_or_null_rcu(&port->devs,
							 struct nmv_dev,
							 in_port);
		}
		done += nmv_bcast_copy(port, budget - done);
	}
	spin_unlock(&b->lock);
	rcu_read_unlock();
	if (done < budget)
		napi_complete_done(napi, done);
	return done;
}

static bool nmv_bcast_admits(const struct nmv_bcast *b)
{
	return nmv_queue_admits(skb_queue_len_lockless(&b->frames),
				NMV_BCAST_LEN) &&
	       nmv_queue_admits(READ_ONCE(b->bytes), NMV_QUEUE_BYTES);
}

/**
 * nmv_bcast_add() - the NIC received broadcast or multicast
 * @port: port
 * @skb: frame, kept by the caller; the data begin after the Ethernet header
 *
 * Context: bottom halves off, RCU read side.
 */
void nmv_bcast_add(struct nmv_port *port, struct sk_buff *skb)
{
	struct nmv_bcast *b = &port->bcast;
	struct sk_buff *copy;
	bool room;

	copy = nmv_bcast_admits(b) ? skb_clone(skb, GFP_ATOMIC) : NULL;
	if (!copy) {
		atomic64_inc(&b->dropped);
		return;
	}
	spin_lock(&b->frames.lock);
	room = nmv_bcast_admits(b);
	if (room) {
		__skb_queue_tail(&b->frames, copy);
		WRITE_ONCE(b->bytes, b->bytes + copy->truesize);
	}
	spin_unlock(&b->frames.lock);
	if (!room) {
		atomic64_inc(&b->dropped);
		kfree_skb_reason(copy, SKB_DROP_REASON_FULL_RING);
		return;
	}
	napi_schedule(&b->napi);
}

/**
 * nmv_bcast_forget() - a device leaves the port
 * @port: port
 * @nd: device, still in its list of devices
 *
 * Takes it off that list, so that nobody but RCU readers knows it any more.
 *
 * Context: RTNL.
 */
void nmv_bcast_forget(struct nmv_port *port, struct nmv_dev *nd)
{
	struct nmv_bcast *b = &port->bcast;

	spin_lock_bh(&b->lock);
	if (b->next == nd)
		b->next = nmv_bcast_after(port, nd);
	list_del_rcu(&nd->in_port);
	spin_unlock_bh(&b->lock);
}

/**
 * nmv_bcast_init() - before the port receives
 * @port: port
 *
 * Context: RTNL.
 * Return: 0 or an errno
 */
int nmv_bcast_init(struct nmv_port *port)
{
	struct nmv_bcast *b = &port->bcast;

	b->dev = nmv_dummy_alloc();
	if (!b->dev)
		return -ENOMEM;
	/* For those who look at polls, by the tracepoint or with drgn. */
	strscpy(b->dev->name, "nmv-broadcast", IFNAMSIZ);
	skb_queue_head_init(&b->frames);
	spin_lock_init(&b->lock);
	netif_napi_add(b->dev, &b->napi, nmv_bcast_poll);
	napi_enable(&b->napi);
	return 0;
}

/**
 * nmv_bcast_exit() - when the port receives no more
 * @port: port
 *
 * Context: RTNL.
 */
void nmv_bcast_exit(struct nmv_port *port)
{
	struct nmv_bcast *b = &port->bcast;

	napi_disable(&b->napi);
	netif_napi_del(&b->napi);
	skb_queue_purge(&b->frames);
	kfree_skb_reason(b->skb, SKB_DROP_REASON_DEV_READY);
	nmv_dummy_free(b->dev);
}
