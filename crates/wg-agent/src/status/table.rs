//! Renders the state for `wg-agent status` as text.

use std::{collections::BTreeMap, fmt::Write as _};

use super::view::{DeviceView, NodeView, PeerView, View};

/// Renders the whole output.
pub(crate) fn page(view: &View) -> String {
    let mut page = String::new();
    let summary = summary(view);
    let width = summary.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in summary {
        let _ = writeln!(page, "{name:width$}  {value}");
    }
    if !view.peers.is_empty() {
        page.push('\n');
        page.push_str(&peer_table(&view.peers));
    }
    let down = view.peers.values().filter(|peer| peer.state == "down").count();
    if down > 0 {
        let _ = writeln!(
            page,
            "\n{down} down: most likely UDP to or from the endpoint is blocked, the endpoint is wrong, or the node is down"
        );
    }
    let troubles = view.troubles.iter().map(|t| {
        let suffix = if t.harmless { " (harmless)" } else { "" };
        format!("{}{suffix}: {}", t.part, t.message)
    });
    write_list(&mut page, "Troubles", troubles);
    write_list(&mut page, "Left out", view.refused.iter().cloned());
    page
}

fn write_list(page: &mut String, title: &str, lines: impl Iterator<Item = String>) {
    for (index, line) in lines.enumerate() {
        if index == 0 {
            let _ = writeln!(page, "\n{title}");
        }
        let _ = writeln!(page, "- {line}");
    }
}

/// The lines above the table of peers: name and value.
fn summary(view: &View) -> Vec<(&'static str, String)> {
    let mut summary = Vec::new();
    if let Some(gateway) = &view.gateway {
        let served = format!("{} sandboxes, {} grants", gateway.sandboxes, gateway.grants);
        return vec![
            ("Key", gateway.public_key.clone()),
            ("Gateway", format!("{}, {}", gateway.version, gateway.backend)),
            ("Addresses", gateway.wireguard_ips.join(" ")),
            ("Endpoints", gateway.endpoints.join(" ")),
            ("Serves", served),
        ];
    }
    let Some(NodeView {
        name,
        public_key,
        wireguard_ip,
        underlay,
    }) = &view.node
    else {
        return vec![("Node", "the agent has not finished its first pass".to_owned())];
    };
    // In policy mode the tunnel belongs to kg, so WireGuard address, key, device, underlay and peers are empty.
    let address = wireguard_ip.map(|ip| format!(", WireGuard address {ip}"));
    summary.push(("Node", format!("{name}{}", address.unwrap_or_default())));
    if !public_key.is_empty() {
        summary.push(("Key", public_key.clone()));
    }
    if let Some(agent) = &view.agent {
        summary.push(("Agent", format!("{}, mode {}", agent.version, agent.mode)));
        if !agent.datapath_bypassed.is_empty() {
            let why = &agent.datapath_bypassed;
            summary.push((
                "Datapath",
                format!("bypassed ({why}): PeerPolicies are not enforced here"),
            ));
        }
    }
    // Empty = not checked yet; "restricted" = an admission policy restricts the agent's account, so there is nothing to report.
    if !matches!(view.admission.as_str(), "" | "restricted") {
        summary.push(("Admission", view.admission.clone()));
    }
    if let Some(DeviceView {
        interface,
        backend,
        why,
        mtu,
        listen_port,
        drops,
    }) = &view.device
    {
        summary.push((
            "Device",
            format!("{interface}, {backend} ({why}), MTU {mtu}, UDP port {listen_port}"),
        ));
        let drops: Vec<String> = drops
            .iter()
            .filter(|(_, count)| **count > 0)
            .map(|(reason, count)| format!("{reason} {count}"))
            .collect();
        if !drops.is_empty() {
            summary.push(("Dropped", drops.join(", ")));
        }
    }
    if underlay.interface.is_empty() {
        return summary;
    }
    let addresses: Vec<String> = underlay.addresses.iter().map(ToString::to_string).collect();
    summary.push((
        "Underlay",
        format!("{}, MTU {}, {}", underlay.interface, underlay.mtu, addresses.join(" ")),
    ));
    let count = |state| view.peers.values().filter(|peer| peer.state == state).count();
    summary.push((
        "Peers",
        format!(
            "{} up, {} down, {} unknown",
            count("up"),
            count("down"),
            count("unknown")
        ),
    ));
    summary
}

/// Renders the peers, sorted by mesh and cluster; in each cluster, peers that are down come first.
fn peer_table(peers: &BTreeMap<String, PeerView>) -> String {
    let mut rows: Vec<(&String, &PeerView)> = peers.iter().collect();
    rows.sort_by_key(|(name, peer)| (&peer.mesh, &peer.cluster, peer.state != "down", *name));
    let mut table = vec![["CLUSTER", "PEER", "STATE", "ENDPOINT", "HANDSHAKE", "RECEIVED", "SENT"].map(String::from)];
    table.extend(rows.into_iter().map(|(name, peer)| {
        let cluster = if peer.cluster.is_empty() { "-" } else { &peer.cluster };
        let endpoint = peer.live_endpoint.or(peer.configured_endpoint);
        [
            cluster.to_owned(),
            name.clone(),
            peer.state.clone(),
            endpoint.map_or_else(|| "-".to_owned(), |at| at.to_string()),
            peer.handshake_age_seconds
                .map_or_else(|| "never".to_owned(), format_age),
            format_bytes(peer.rx_bytes),
            format_bytes(peer.tx_bytes),
        ]
    }));
    align_columns(&table)
}

fn align_columns<const N: usize>(table: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in table {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in table {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    text
}

fn format_age(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s ago"),
        120..=7199 => format!("{} min ago", seconds / 60),
        _ => format!("{} h ago", seconds / 3600),
    }
}

fn format_bytes(count: u64) -> String {
    let mut unit = 0;
    let mut whole = count;
    let mut rest = 0;
    while whole >= 1024 && unit < 5 {
        rest = whole % 1024;
        whole /= 1024;
        unit += 1;
    }
    let unit_name = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit];
    if unit == 0 {
        format!("{whole} {unit_name}")
    } else {
        format!("{whole}.{} {unit_name}", rest * 10 / 1024)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::view::{TroubleView, UnderlayView};

    fn view() -> View {
        let peer = |cluster: &str, state: &str| PeerView {
            mesh: "ns/prod".into(),
            cluster: cluster.into(),
            state: state.into(),
            configured_endpoint: Some("192.0.2.9:51820".parse().unwrap()),
            ..PeerView::default()
        };
        let up = PeerView {
            live_endpoint: Some("[2001:db8::9]:51820".parse().unwrap()),
            handshake_age_seconds: Some(125),
            rx_bytes: 1_600_000,
            tx_bytes: 1023,
            ..peer("mgmt", "up")
        };
        View {
            admission: "restricted".into(),
            agent: Some(clustermesh_api::annotations::AgentStatus {
                version: "1.2.3".into(),
                mode: "full".into(),
                ..Default::default()
            }),
            node: Some(NodeView {
                name: "tenant-a-1".into(),
                public_key: "F5rh=".into(),
                wireguard_ip: Some("100.66.2.1".parse().unwrap()),
                underlay: UnderlayView {
                    interface: "eth0".into(),
                    mtu: 1500,
                    addresses: vec!["192.0.2.7".parse().unwrap()],
                    next_hops: vec![],
                },
            }),
            gateway: None,
            device: Some(DeviceView {
                interface: "kilo0".into(),
                backend: "userspace".into(),
                why: "set by --backend=userspace".into(),
                mtu: 1420,
                listen_port: 51820,
                drops: [("source".to_owned(), 3), ("queue".to_owned(), 0)].into(),
            }),
            peers: [
                ("prod--mgmt--a".to_owned(), up),
                ("prod--mgmt--b".to_owned(), peer("mgmt", "down")),
                (
                    "mine".to_owned(),
                    PeerView {
                        mesh: String::new(),
                        ..peer("", "unknown")
                    },
                ),
            ]
            .into(),
            refused: vec!["Peer x: OwnPodCIDR: no".into()],
            troubles: vec![TroubleView {
                part: "firewall".into(),
                message: "nft is missing: install it".into(),
                harmless: false,
            }],
        }
    }

    #[test]
    fn status_table_shows_node_peers_and_troubles() {
        let want = "\
Node      tenant-a-1, WireGuard address 100.66.2.1
Key       F5rh=
Agent     1.2.3, mode full
Device    kilo0, userspace (set by --backend=userspace), MTU 1420, UDP port 51820
Dropped   source 3
Underlay  eth0, MTU 1500, 192.0.2.7
Peers     1 up, 1 down, 1 unknown

CLUSTER  PEER           STATE    ENDPOINT             HANDSHAKE  RECEIVED  SENT
-        mine           unknown  192.0.2.9:51820      never      0 B       0 B
mgmt     prod--mgmt--b  down     192.0.2.9:51820      never      0 B       0 B
mgmt     prod--mgmt--a  up       [2001:db8::9]:51820  2 min ago  1.5 MiB   1023 B

1 down: most likely UDP to or from the endpoint is blocked, the endpoint is wrong, or the node is down

Troubles
- firewall: nft is missing: install it

Left out
- Peer x: OwnPodCIDR: no
";
        assert_eq!(page(&view()), want);
        assert_eq!(
            page(&View::default()),
            "Node  the agent has not finished its first pass\n"
        );
    }

    #[test]
    fn down_peer_bypass_or_trouble_makes_a_node_unhealthy() {
        let mut view = view();
        view.refused.clear();
        view.troubles[0].harmless = true;
        assert!(!view.is_healthy());
        let mut one = view.clone();
        one.filter_peers(Some("mgmt"), Some("prod--mgmt--b"));
        assert_eq!((one.peers.len(), one.is_healthy()), (1, false));
        view.filter_peers(Some("mgmt"), Some("prod--mgmt--a"));
        assert!(view.is_healthy());
        let mut bypassed = view.clone();
        bypassed.agent.as_mut().unwrap().datapath_bypassed = "datapath-mode is netkit".into();
        assert!(!bypassed.is_healthy());
        assert!(
            page(&bypassed)
                .contains("Datapath  bypassed (datapath-mode is netkit): PeerPolicies are not enforced here\n"),
            "{}",
            page(&bypassed)
        );
        view.troubles[0].harmless = false;
        assert!(!view.is_healthy());
        assert!(!View::default().is_healthy(), "nothing is known yet");
    }

    #[test]
    fn gateway_status_shows_key_addresses_and_counts() {
        let gateway = serde_json::json!({
            "publicKey": "F5rh=", "wireguardIPs": ["100.80.1.0"], "endpoints": ["10.10.1.7:51820", "192.0.2.7:30820"],
            "version": "1.2.3", "backend": "kernel", "sandboxes": 2, "grants": 3,
        });
        let view: View = serde_json::from_value(serde_json::json!({"gateway": gateway})).unwrap();
        let want = "\
Key        F5rh=
Gateway    1.2.3, kernel
Addresses  100.80.1.0
Endpoints  10.10.1.7:51820 192.0.2.7:30820
Serves     2 sandboxes, 3 grants
";
        assert_eq!((&*page(&view), view.is_healthy()), (want, true));
    }
}
