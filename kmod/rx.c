// SPDX-License-Identifier: GPL-2.0
/*
 * Frames that the lower device receives. Unicast goes on in the same SoftIRQ
 * with no queue between; multicast goes to the broadcast queue of the port.
 */
#include <linux/rtnetlink.h>
#include "nmv.h"

static bool nmv_hears(const struct nmv_port *port, const struct nmv_dev *nd,
		      const u8 *source)
{
	/* Who sent it is looked up for those only whom it matters to. */
	return nmv_hears_nic_unicast(true, READ_ONCE(nd->mode)) ||
	       nmv_hears_nic_unicast(nmv_port_find(port, source),
				     READ_ONCE(nd->mode));
}

/**
 * nmv_handle_frame() - receive handler of the lower device
 * @pskb: frame; the data begin after the Ethernet header
 *
 * Context: SoftIRQ or bottom halves off, RCU read side.
 * Return: RX_HANDLER_ANOTHER when the frame goes on as one of our device,
 * RX_HANDLER_CONSUMED when it was dropped, RX_HANDLER_PASS when it is (also)
 * for the lower device's own stack
 */
rx_handler_result_t nmv_handle_frame(struct sk_buff **pskb)
{
	struct sk_buff *skb = *pskb;
	enum skb_drop_reason reason;
	const struct ethhdr *eth;
	struct nmv_port *port;
	struct nmv_dev *nd;

	/* Looped back by the host's own stack: it has no Ethernet header. */
	if (unlikely(skb->pkt_type == PACKET_LOOPBACK))
		return RX_HANDLER_PASS;

	port = rcu_dereference(skb->dev->rx_handler_data);
	eth = eth_hdr(skb);
	if (is_multicast_ether_addr(eth->h_dest)) {
		if (likely(skb->protocol != htons(ETH_P_PAUSE)))
			nmv_bcast_add(port, skb);
		return RX_HANDLER_PASS;
	}

	if (port->passthru)
		nd = list_first_or_null_rcu(&port->devs, struct nmv_dev,
					    in_port);
	else
		nd = nmv_port_find(port, eth->h_dest);
	if (!nd)
		return RX_HANDLER_PASS;

	nmv_count_frame(nd, NMV_RX_RECEIVED, NMV_RX_NIC, 1);
	if (unlikely(!nmv_hears(port, nd, eth->h_source))) {
		nmv_count(nd, NMV_RX_DROPPED_OTHER, 1);
		reason = SKB_DROP_REASON_OTHERHOST;
		goto drop;
	}
	/* A shared frame is about to be copied: better know before. */
	if (skb_shared(skb)) {
		if (nd->tap && nmv_tap_early_drop(nd, skb, &reason))
			goto drop;
		skb = skb_share_check(skb, GFP_ATOMIC);
		if (!skb) {
			nmv_count(nd, NMV_RX_DROPPED_OTHER, 1);
			return RX_HANDLER_CONSUMED;
		}
		*pskb = skb;
		eth = eth_hdr(skb);
	}
	skb->dev = nd->dev;
	if (ether_addr_equal_64bits(eth->h_dest, nd->dev->dev_addr))
		skb->pkt_type = PACKET_HOST;
	else
		skb->pkt_type = PACKET_OTHERHOST;
	if (!nd->tap)
		nmv_queue_delivered(nd, skb);
	return RX_HANDLER_ANOTHER;

drop:
	kfree_skb_reason(skb, reason);
	return RX_HANDLER_CONSUMED;
}
