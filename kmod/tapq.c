// SPDX-License-Identifier: GPL-2.0
/*
 * What we know about the open queues of /dev/tapN: counters, and which task
 * sends through each. tap.ko opens and closes them without telling, so they
 * are looked for when a frame meets an unknown one and when statistics are
 * read.
 *
 * vhost-net sends small frames in batches as bare buffers: by the time they
 * reach ndo_start_xmit nothing says which queue they came through. It is the
 * call of the queue's sendmsg that says it. So a queue, once found, gets
 * socket operations that are tap.ko's own but for a sendmsg that notes the
 * task and goes on to tap.ko's. They are one static table: a file that outlives
 * its device keeps them, and keeps this module loaded, as it holds our
 * character device.
 */
#include <linux/if_tun.h>
#include <linux/rtnetlink.h>
#include <linux/sched.h>
#include "nmv.h"

/* The least time between two scans of a device. */
#define NMV_SCAN_EVERY		(HZ / 20 ?: 1)

static struct proto_ops nmv_sock_ops;
/* By which a socket is known to be that of a queue; NULL before the first. */
static struct proto *nmv_tap_proto;
static int (*nmv_tap_sendmsg)(struct socket *sock, struct msghdr *m,
			      size_t len);

/**
 * nmv_tapq_find() - counters of a queue
 * @t: device
 * @q: one of its queues, as read from tap_dev.taps or tap_queue.tap
 *
 * Context: RCU read side.
 * Return: NULL if the queue is new and not looked at yet
 */
struct nmv_tapq *nmv_tapq_find(struct nmv_tap *t, struct tap_queue *q)
{
	u32 at = READ_ONCE(q->queue_index);
	struct nmv_tapq *slot;

	/* A new queue may have the address of one that was closed. */
	if (READ_ONCE(q->sock.ops) != &nmv_sock_ops)
		return NULL;
	if (at >= MAX_TAP_QUEUES)
		return NULL;
	slot = rcu_dereference(t->slots[at]);
	return slot && slot->q == q ? slot : NULL;
}

static struct nmv_tap *nmv_tapq_device(struct tap_queue *q)
{
	struct tap_dev *tap = rcu_dereference(q->tap);

	return tap ? container_of(tap, struct nmv_tap, tap) : NULL;
}

/* Frames in one call of sendmsg: a batch says how many it holds. */
static unsigned int nmv_tapq_batch(const struct msghdr *m)
{
	const struct tun_msg_ctl *ctl = m->msg_control;

	if (m->msg_controllen == sizeof(*ctl) && ctl && ctl->type == TUN_MSG_PTR)
		return ctl->num;
	return 1;
}

static int nmv_sendmsg(struct socket *sock, struct msghdr *m, size_t len)
{
	struct tap_queue *q = container_of(sock, struct tap_queue, sock);
	struct nmv_tapq *slot;
	struct nmv_tap *t;
	int ret;

	rcu_read_lock();
	t = nmv_tapq_device(q);
	slot = t ? nmv_tapq_find(t, q) : NULL;
	if (slot) {
		WRITE_ONCE(slot->tid, task_pid_nr(current));
		WRITE_ONCE(slot->sender, current);
		atomic64_add(nmv_tapq_batch(m), &slot->tx_packets);
	} else if (t) {
		/* Others were closed and this one got another number. */
		nmv_tapq_ask(t);
	}
	rcu_read_unlock();

	ret = nmv_tap_sendmsg(sock, m, len);

	rcu_read_lock();
	t = nmv_tapq_device(q);
	slot = t ? nmv_tapq_find(t, q) : NULL;
	if (slot)
		WRITE_ONCE(slot->sender, NULL);
	rcu_read_unlock();
	return ret;
}

static void nmv_tapq_hook(struct tap_queue *q)
{
	if (!nmv_tap_sendmsg) {
		nmv_sock_ops = *q->sock.ops;
		nmv_tap_sendmsg = nmv_sock_ops.sendmsg;
		nmv_sock_ops.sendmsg = nmv_sendmsg;
		WRITE_ONCE(nmv_tap_proto, q->sk.sk_prot);
	}
	/* The table before the pointer to it. */
	smp_store_release(&q->sock.ops, &nmv_sock_ops);
}

static struct nmv_tapq *nmv_tapq_known(struct nmv_tap *t, struct tap_queue *q)
{
	struct nmv_tapq *slot;

	if (q->sock.ops != &nmv_sock_ops)
		return NULL;
	list_for_each_entry(slot, &t->known, list)
		if (slot->q == q)
			return slot;
	return NULL;
}

static struct nmv_tapq *nmv_tapq_new(void)
{
	struct nmv_tapq *slot = kzalloc(sizeof(*slot), GFP_KERNEL);

	if (!slot)
		return NULL;
	slot->counts = netdev_alloc_pcpu_stats(struct nmv_tapq_pcpu);
	if (slot->counts)
		return slot;
	kfree(slot);
	return NULL;
}

static void nmv_tapq_free(struct rcu_head *head)
{
	struct nmv_tapq *slot = container_of(head, struct nmv_tapq, rcu);

	free_percpu(slot->counts);
	kfree(slot);
}

/**
 * nmv_tapq_scan() - find queues opened and closed since the last time
 * @t: device
 *
 * Context: RTNL, under which tap.ko opens and closes.
 */
void nmv_tapq_scan(struct nmv_tap *t)
{
	struct nmv_tapq *slot, *next;
	struct tap_queue *q;
	LIST_HEAD(alive);
	int i;

	WRITE_ONCE(t->scanned, jiffies);
	list_for_each_entry(q, &t->tap.queue_list, next) {
		slot = nmv_tapq_known(t, q);
		if (!slot) {
			slot = nmv_tapq_new();
			if (!slot)
				continue;
			slot->q = q;
			slot->read_at = jiffies;
			slot->full_at = jiffies - NMV_TAP_FULL;
			INIT_LIST_HEAD(&slot->list);
			nmv_tapq_hook(q);
		}
		list_move_tail(&slot->list, &alive);
	}
	for (i = 0; i < MAX_TAP_QUEUES; i++) {
		q = i < t->tap.numvtaps ? rtnl_dereference(t->tap.taps[i]) : NULL;
		slot = NULL;
		if (q)
			list_for_each_entry(next, &alive, list)
				if (next->q == q)
					slot = next;
		rcu_assign_pointer(t->slots[i], slot);
	}
	list_for_each_entry_safe(slot, next, &t->known, list) {
		list_del(&slot->list);
		call_rcu(&slot->rcu, nmv_tapq_free);
	}
	list_splice(&alive, &t->known);
}

static void nmv_tapq_work(struct work_struct *work)
{
	struct nmv_tap *t = container_of(to_delayed_work(work), struct nmv_tap,
					 scan);

	/* The end of the device waits for this under RTNL: do not wait too. */
	if (!rtnl_trylock()) {
		schedule_delayed_work(&t->scan, NMV_SCAN_EVERY);
		return;
	}
	nmv_tapq_scan(t);
	rtnl_unlock();
}

/**
 * nmv_tapq_ask() - have the queues looked at soon
 * @t: device
 *
 * For every frame that meets an unknown queue: at once when nobody has looked
 * for a while, and else not before NMV_SCAN_EVERY, however many ask.
 *
 * Context: any.
 */
void nmv_tapq_ask(struct nmv_tap *t)
{
	bool recent = time_before(jiffies,
				  READ_ONCE(t->scanned) + NMV_SCAN_EVERY);

	schedule_delayed_work(&t->scan, recent ? NMV_SCAN_EVERY : 0);
}

/**
 * nmv_tapq_sent() - a frame with a socket is being sent by the device
 * @t: device
 * @sk: any socket; perhaps of one of its queues
 *
 * That is how write() on /dev/tapN sends, and large frames of vhost-net.
 * The latter were noted in sendmsg already.
 *
 * Context: RCU read side.
 */
void nmv_tapq_sent(struct nmv_tap *t, struct sock *sk)
{
	const struct proto *taps = READ_ONCE(nmv_tap_proto);
	struct tap_queue *q = container_of(sk, struct tap_queue, sk);
	struct nmv_tapq *slot;

	if (taps && READ_ONCE(sk->sk_prot) != taps)
		return;
	/* Until a first queue was looked at, what sockets they have is unknown. */
	slot = taps ? nmv_tapq_find(t, q) : NULL;
	if (!slot) {
		if (READ_ONCE(t->tap.numvtaps))
			nmv_tapq_ask(t);
	} else if (in_task() && READ_ONCE(slot->sender) != current) {
		WRITE_ONCE(slot->tid, task_pid_nr(current));
		atomic64_inc(&slot->tx_packets);
	}
}

void nmv_tapq_init(struct nmv_tap *t)
{
	INIT_LIST_HEAD(&t->known);
	INIT_DELAYED_WORK(&t->scan, nmv_tapq_work);
	t->scanned = jiffies - NMV_SCAN_EVERY;
}

/**
 * nmv_tapq_exit() - forget all queues
 * @t: device that neither receives nor sends any more, its queues taken off
 *
 * Context: RTNL.
 */
void nmv_tapq_exit(struct nmv_tap *t)
{
	cancel_delayed_work_sync(&t->scan);
	nmv_tapq_scan(t);
}
