//! What `/debug/state` shows of the last pass and the last look: what went in, what came out, what the device says. Values
//! only, and no secret: keys are public ones.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use clustermesh_agent_core::{compile::Inputs, firewall::render, policy};
use serde_json::{Value, json};

use super::{Current, look::Looked};
use crate::status::{
    Dump,
    view::{NodeView, PeerView, UnderlayView},
};

/// Shows a pass and a look.
pub(super) fn show(dump: &Dump, node: NodeView, current: &Arc<Current>, looked: &Arc<Looked>) {
    dump.set("node", json!(node));
    dump.set("device", json!(looked.device));
    dump.set("agent", json!(looked.agent));
    let of = |make: fn(&Current, &Looked) -> Value| {
        let (current, looked) = (Arc::clone(current), Arc::clone(looked));
        move || make(&current, &looked)
    };
    dump.show("peers", of(|current, looked| json!(peers(current, looked))));
    dump.show("inputs", of(|current, _| inputs(&current.inputs)));
    dump.show("compiled", of(|current, _| compiled(current)));
    dump.show("observed", of(observed));
}

/// The node, for a person.
pub(super) fn node(name: &str, public_key: String, current: &Current) -> NodeView {
    let underlay = &current.underlay;
    NodeView {
        name: name.to_owned(),
        public_key,
        wireguard_ip: Some(current.wireguard_ip),
        underlay: UnderlayView {
            interface: underlay.interface.to_string(),
            mtu: underlay.mtu.into(),
            addresses: underlay.addresses.keys().copied().collect(),
            next_hops: underlay.next_hops.iter().copied().collect(),
        },
    }
}

fn peers(current: &Current, looked: &Looked) -> BTreeMap<String, PeerView> {
    let compiled = &current.compiled;
    let since = looked.at.elapsed();
    let views = compiled.peers.iter().map(|(key, spec)| {
        let member = current.members.get(key).cloned().unwrap_or_default();
        let (namespace, mesh) = &member.mesh;
        let seen = looked.peers.get(key);
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
            largest_packet: *current.sizes.narrow.get(key).unwrap_or(&current.sizes.device),
            handshake_age_seconds: stats.handshake_age.map(|age| (age + since).as_secs()),
            rx_bytes: stats.rx_bytes,
            tx_bytes: stats.tx_bytes,
        };
        // Two Peers with one key are one peer; each key has a name.
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
        nodes,
        pods_elsewhere,
        peers,
        policies,
        narrow,
    } = inputs;
    let rules = |rules: &[policy::Rule]| -> Vec<Value> {
        let rule = |rule: &policy::Rule| json!({"to": rule.to, "ports": ports(&rule.ports)});
        rules.iter().map(rule).collect()
    };
    json!({
        "node": {
            "wireguardIPs": node.wireguard_ips,
            "device": node.device.as_str(),
            "listenPort": node.listen_port,
            "mtu": node.mtu,
            "underlay": node.underlay.as_str(),
            "underlayAddresses": node.underlay_addresses,
            "addresses": node.addresses,
            "podCIDRs": node.pod_cidrs,
        },
        "throw": throw,
        "apiServers": api_servers,
        "nodes": nodes,
        "podsElsewhere": pods_elsewhere,
        "peers": peers.iter().map(|peer| (&peer.name, json!({
            "revision": peer.revision,
            "key": peer.public_key.to_string(),
            "presharedKey": peer.preshared_key.is_some(),
            "endpoint": peer.endpoint,
            "candidates": peer.candidates,
            "keepaliveSeconds": peer.keepalive,
            "allowedIPs": peer.allowed_ips,
            "largestPacket": narrow.get(&peer.public_key),
        }))).collect::<BTreeMap<_, _>>(),
        "policies": policies.iter().map(|policy| (&policy.name, json!({
            "sources": policy.sources,
            "networks": policy.networks,
            "allow": rules(&policy.allow),
            "deny": rules(&policy.deny),
            "infrastructurePorts": ports(&policy.infrastructure_ports),
            "anchored": policy.anchored,
            "closed": policy.closed,
        }))).collect::<BTreeMap<_, _>>(),
    })
}

fn ports(ports: &BTreeSet<policy::Port>) -> Vec<String> {
    ports
        .iter()
        .map(|port| format!("{}/{}", port.protocol, port.port))
        .collect()
}

fn compiled(current: &Current) -> Value {
    let compiled = &current.compiled;
    let routes = &compiled.routes;
    json!({
        "addresses": routes.addresses,
        "routes": routes.routes.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "rules": routes.rules.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "firewall": render(&compiled.firewall).lines().collect::<Vec<_>>(),
        "sysctls": compiled.sysctls.iter().map(|s| format!("{} = {}", s.name, s.value)).collect::<Vec<_>>(),
        "policyRevision": current.policy_revision,
    })
}

/// What the device holds besides what was compiled is somebody else's doing.
fn observed(current: &Current, looked: &Looked) -> Value {
    let strangers = looked
        .peers
        .keys()
        .filter(|key| !current.compiled.peers.contains_key(key));
    json!({
        "secondsAgo": looked.at.elapsed().as_secs(),
        "devicePeers": looked.peers.len(),
        "unexpectedPeers": strangers.map(ToString::to_string).collect::<Vec<_>>(),
    })
}
