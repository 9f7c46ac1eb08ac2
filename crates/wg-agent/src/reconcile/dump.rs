//! Renders the last pass and the last poll for `/debug/state`: inputs, compiled state, device. Contains no private or preshared key.

use std::{collections::BTreeMap, sync::Arc};

use clustermesh_agent_core::{compile::Inputs, firewall::render};
use serde_json::{Value, json};

use super::{AppliedState, poll_peers::PeerPoll};
use crate::status::{
    Dump,
    view::{NodeView, PeerView, UnderlayView},
};

/// Updates the dump with a pass and a poll.
pub(super) fn update(dump: &Dump, node: NodeView, applied: &Arc<AppliedState>, poll: &Arc<PeerPoll>) {
    dump.set("node", json!(node));
    dump.set("device", json!(poll.device));
    dump.set("agent", json!(poll.agent));
    let render_later = |make: fn(&AppliedState, &PeerPoll) -> Value| {
        let (applied, poll) = (Arc::clone(applied), Arc::clone(poll));
        move || make(&applied, &poll)
    };
    dump.set_lazy("peers", render_later(|applied, poll| json!(peers(applied, poll))));
    dump.set_lazy("inputs", render_later(|applied, _| inputs(&applied.inputs)));
    dump.set_lazy("compiled", render_later(|applied, _| compiled(applied)));
    dump.set_lazy("observed", render_later(observed));
}

/// The node as `wg-agent status` shows it.
pub(super) fn node(name: &str, public_key: String, applied: &AppliedState) -> NodeView {
    let underlay = &applied.underlay;
    NodeView {
        name: name.to_owned(),
        public_key,
        wireguard_ip: Some(applied.wireguard_ip),
        underlay: UnderlayView {
            interface: underlay.interface.to_string(),
            mtu: underlay.mtu.into(),
            addresses: underlay.addresses.keys().copied().collect(),
            next_hops: underlay.next_hops.iter().copied().collect(),
        },
    }
}

fn peers(applied: &AppliedState, poll: &PeerPoll) -> BTreeMap<String, PeerView> {
    let compiled = &applied.compiled;
    let since = poll.at.elapsed();
    let views = compiled.peers.iter().map(|(key, spec)| {
        let member = applied.members.get(key).cloned().unwrap_or_default();
        let (namespace, mesh) = &member.mesh;
        let seen = poll.peers.get(key);
        let stats = seen.map(|seen| seen.stats.clone()).unwrap_or_default();
        let view = PeerView {
            mesh: if mesh.is_empty() {
                String::new()
            } else {
                format!("{namespace}/{mesh}")
            },
            cluster: member.cluster,
            key: key.to_string(),
            state: seen.map_or("unknown", |seen| seen.state.as_str()).to_owned(),
            allowed_ips: spec.allowed_ips.clone(),
            candidates: compiled.endpoints.get(key).cloned().unwrap_or_default(),
            configured_endpoint: seen.and_then(|seen| seen.configured),
            live_endpoint: stats.endpoint,
            keepalive_seconds: spec.keepalive.map(Into::into),
            largest_packet: *applied.sizes.peer_mtus.get(key).unwrap_or(&applied.sizes.device),
            handshake_age_seconds: stats.handshake_age.map(|age| (age + since).as_secs()),
            rx_bytes: stats.rx_bytes,
            tx_bytes: stats.tx_bytes,
        };
        // Two Peers with the same key are one WireGuard peer, and so one entry.
        (
            compiled.names.get(key).cloned().unwrap_or_else(|| key.to_string()),
            view,
        )
    });
    views.collect()
}

fn inputs(inputs: &Inputs) -> Value {
    let Inputs {
        node,
        throw,
        api_servers,
        all_node_addresses,
        pod_cidrs_of_other_nodes,
        own_sources,
        peers,
        policies,
        peer_mtus,
    } = inputs;
    json!({
        "node": {
            "wireguardIPs": node.wireguard_ips,
            "device": node.device.as_str(),
            "listenPort": node.listen_port,
            "mtu": node.mtu,
            "underlay": node.underlay.as_str(),
            "underlayAddresses": node.underlay_addresses,
            "addresses": node.internal_ips,
            "podCIDRs": node.pod_cidrs,
        },
        "throw": throw,
        "apiServers": api_servers,
        "nodes": all_node_addresses,
        "podsElsewhere": pod_cidrs_of_other_nodes,
        "ownSources": own_sources,
        "peers": peers.iter().map(|peer| (&peer.name, json!({
            "revision": peer.revision,
            "key": peer.public_key.to_string(),
            "presharedKey": peer.preshared_key.is_some(),
            "endpoint": peer.endpoint,
            "candidates": peer.candidates,
            "keepaliveSeconds": peer.keepalive,
            "allowedIPs": peer.allowed_ips,
            "largestPacket": peer_mtus.get(&peer.public_key),
        }))).collect::<BTreeMap<_, _>>(),
        "policies": policies,
    })
}

fn compiled(applied: &AppliedState) -> Value {
    let compiled = &applied.compiled;
    let routes = &compiled.routes;
    json!({
        "addresses": routes.addresses,
        "routes": routes.routes.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "rules": routes.rules.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "firewall": render(&compiled.firewall).lines().collect::<Vec<_>>(),
        "sysctls": compiled.sysctls.iter().map(|s| format!("{} = {}", s.name, s.value)).collect::<Vec<_>>(),
        "policyRevision": applied.policy_revision,
    })
}

/// Describes the poll. Peers on the device that are not among the compiled peers were added by other
/// programs, or could not be removed.
fn observed(applied: &AppliedState, poll: &PeerPoll) -> Value {
    let unexpected = poll
        .peers
        .keys()
        .filter(|key| !applied.compiled.peers.contains_key(key));
    json!({
        "secondsAgo": poll.at.elapsed().as_secs(),
        "devicePeers": poll.peers.len(),
        "unexpectedPeers": unexpected.map(ToString::to_string).collect::<Vec<_>>(),
    })
}
