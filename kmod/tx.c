// SPDX-License-Identifier: GPL-2.0
/* Frames that our devices send: to siblings, or to the lower device. */
#include "nmv.h"

/*
 * Copies for siblings, or the frame itself for one of them: true, and it is
 * consumed. The sender of a packet socket is in no read side of RCU but that
 * of bottom halves, so whoever calls has entered one.
 */
static bool nmv_to_siblings(struct nmv_dev *nd, struct nmv_port *port,
			    struct sk_buff *skb)
{
	u32 mode = READ_ONCE(nd->mode);
	unsigned int len = skb->len;
	struct nmv_dev *to;

	if (is_multicast_ether_addr(eth_hdr(skb)->h_dest)) {
		list_for_each_entry_rcu(to, &port->devs, in_port)
			if (to != nd &&
			    nmv_hears_sibling(mode, READ_ONCE(to->mode)))
				nmv_queue_offer_copy(to, skb, true);
		return false;
	}
	to = nmv_port_find(port, eth_hdr(skb)->h_dest);
	if (!to)
		to = rcu_dereference(port->uplink);
	if (!to || to == nd || !nmv_hears_sibling(mode, READ_ONCE(to->mode)))
		return false;
	nmv_queue_offer(to, skb);
	nmv_count_frame(nd, NMV_TX_SIBLING, NMV_TX_BYTES, len);
	return true;
}

/**
 * nmv_start_xmit() - ndo_start_xmit
 * @skb: frame; consumed
 * @dev: sender
 *
 * There is no queueing discipline and no lock above it, so it runs in the
 * context of whoever sends; for a guest that is its vhost worker.
 *
 * Context: bottom halves off.
 * Return: NETDEV_TX_OK; what is not sent is counted and gone
 */
netdev_tx_t nmv_start_xmit(struct sk_buff *skb, struct net_device *dev)
{
	struct nmv_dev *nd = netdev_priv(dev);
	unsigned int len = skb->len;
	struct nmv_port *port;
	bool gone;
	int ret;

	rcu_read_lock();
	port = rcu_dereference(nd->port);
	if (unlikely(!port || !pskb_may_pull(skb, ETH_HLEN))) {
		rcu_read_unlock();
		nmv_count(nd, NMV_TX_DROPPED, 1);
		kfree_skb_reason(skb, port ? SKB_DROP_REASON_PKT_TOO_SMALL :
					     SKB_DROP_REASON_DEV_READY);
		return NETDEV_TX_OK;
	}
	if (nd->tap && skb->sk)
		nmv_tapq_sent(nd->tap, skb->sk);
	skb_reset_mac_header(skb);
	gone = nmv_to_siblings(nd, port, skb);
	rcu_read_unlock();
	if (gone)
		return NETDEV_TX_OK;

	skb->dev = nd->lower;
	ret = dev_queue_xmit(skb);
	if (likely(ret == NET_XMIT_SUCCESS || ret == NET_XMIT_CN)) {
		nmv_count_frame(nd, NMV_TX_LOWER, NMV_TX_BYTES, len);
	} else {
		nmv_count(nd, NMV_TX_DROPPED, 1);
	}
	/* dev_queue_xmit() consumed the frame, whatever it returned. */
	return NETDEV_TX_OK;
}
