//! Formats and parses the values of Node annotations: Kilo's, and the status of wg-agent. [`crate::convert::node`] reads them from a
//! Node; the agent writes them with [`NodeIdentity::annotations`].

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use clustermesh_core::{enforcement::Bypass, key::PublicKey, links::Tunnels, observe::Endpoint};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{
    convert::{excerpt, parse_network},
    names::{
        KILO_DISCOVERED_ENDPOINTS, KILO_ENDPOINT, KILO_GRANULARITY, KILO_INTERNAL_IP, KILO_KEY, KILO_WIREGUARD_IP,
        NODE_AGENT, is_subdomain,
    },
};

/// The limit of Kubernetes for all annotations of an object, in bytes. A hostile API server may send more.
const MAX_TEXT: usize = 256 * 1024;

/// The values that wg-agent publishes on its Node. All except `agent` are in Kilo's formats, so that Kilo's tools and the predecessor can
/// read them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeIdentity {
    /// The node's public key.
    pub public_key: PublicKey,
    /// Its address on the device, with the prefix length of its WireGuard network (Kilo's tools derive the network from it).
    pub wireguard_ip: IpNet,
    /// Its WireGuard endpoint; `None` = not known.
    pub endpoint: Option<SocketAddr>,
    /// Its private address with the prefix length of its interface; `None` = it has none.
    pub internal_ip: Option<IpNet>,
    /// The endpoints from which peers send, by public key. An endpoint is published only if the Peer object with this key does
    /// not contain it, or if the current annotation already contains it.
    pub discovered: BTreeMap<PublicKey, SocketAddr>,
    /// The status of the agent.
    pub agent: AgentStatus,
}

impl NodeIdentity {
    /// The annotations to write. `None` = remove the annotation, because an earlier process may have written it.
    #[must_use]
    pub fn annotations(&self) -> BTreeMap<&'static str, Option<String>> {
        let discovered = (!self.discovered.is_empty()).then(|| discovered_text(&self.discovered));
        BTreeMap::from([
            (KILO_KEY, Some(self.public_key.to_string())),
            (KILO_WIREGUARD_IP, Some(self.wireguard_ip.to_string())),
            (KILO_ENDPOINT, self.endpoint.map(|endpoint| endpoint.to_string())),
            // Empty if there is no address, as kg writes it.
            (
                KILO_INTERNAL_IP,
                Some(self.internal_ip.map(|net| net.to_string()).unwrap_or_default()),
            ),
            // `full`, because other clusters connect to each node of this cluster directly.
            (KILO_GRANULARITY, Some("full".to_owned())),
            (KILO_DISCOVERED_ENDPOINTS, discovered),
            (NODE_AGENT, Some(self.agent.to_string())),
        ])
    }
}

/// The status that wg-agent publishes (`kilo-clustermesh.io/agent`), for users and for the status of a ClusterMesh. A compromised node
/// can publish false values.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// Version of the agent.
    #[serde(default)]
    pub version: String,
    /// `kernel` or `userspace`.
    #[serde(default)]
    pub backend: String,
    /// `full` or `policy`.
    #[serde(default)]
    pub mode: String,
    /// MTU of the agent's device, in bytes.
    #[serde(default)]
    pub mtu: u32,
    /// Revision of the PeerPolicies that the agent enforces: a hash over them.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub policy_revision: String,
    /// Number of peers with a live session.
    #[serde(default)]
    pub peers_up: u32,
    /// Number of peers that should have a session and have none.
    #[serde(default)]
    pub peers_down: u32,
    /// Why packets bypass the PeerPolicies on this node: [`IPVS`], or a reason why they bypass netfilter. Empty = no bypass is known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub datapath_bypassed: String,
    /// The links to members to which a tunnel of this node is down. [`member_key`] makes the keys. See [`AgentStatus::set_links`].
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "parse_links"
    )]
    pub links: BTreeMap<String, Link>,
}

/// The value of [`AgentStatus::datapath_bypassed`] if kube-proxy in IPVS mode translates destinations after the PeerPolicies were
/// evaluated. Any other text that is not empty means that packets bypass netfilter. The text must not change, because programs of other
/// versions compare it.
pub const IPVS: &str = "kube-proxy in mode ipvs translates after the policies looked";

/// The longest value of [`NODE_AGENT`] that is read, in bytes.
const MAX_AGENT: usize = 4096;
/// The part of [`MAX_AGENT`] that the links may use, in bytes. The other fields need a few hundred bytes.
const MAX_LINKS: usize = 3584;

/// The key of a member in [`AgentStatus::links`]. It contains the mesh, because two meshes may use the same name for different clusters.
#[must_use]
pub fn member_key(mesh_namespace: &str, mesh: &str, cluster: &str) -> String {
    format!("{mesh_namespace}/{mesh}/{cluster}")
}

/// The numbers of a node's tunnels to one member. Tunnels that are neither up nor down are idle or new.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Link {
    /// Tunnels with a live session.
    #[serde(default)]
    pub up: u32,
    /// Tunnels that should have a session and have none.
    #[serde(default)]
    pub down: u32,
    /// All tunnels.
    #[serde(default)]
    pub total: u32,
}

impl From<Link> for Tunnels {
    fn from(link: Link) -> Self {
        let Link { up, down, total } = link;
        Self { up, down, total }
    }
}

/// Leaves out links that cannot be parsed. A newer agent or a hostile node may have written them.
fn parse_links<'de, D: serde::Deserializer<'de>>(text: D) -> Result<BTreeMap<String, Link>, D::Error> {
    let value = serde_json::Value::deserialize(text)?;
    let links = value.as_object().into_iter().flatten();
    Ok(links
        .filter_map(|(member, link)| Some((member.clone(), Link::deserialize(link).ok()?)))
        .collect())
}

impl AgentStatus {
    /// How packets bypass the PeerPolicies on this node; `None` = no bypass is known.
    #[must_use]
    pub fn bypassed(&self) -> Option<Bypass> {
        match &*self.datapath_bypassed {
            "" => None,
            IPVS => Some(Bypass::Ipvs),
            _ => Some(Bypass::Cni),
        }
    }

    /// Sets the links with a tunnel that is down. If there are too many for an annotation, those with the fewest tunnels down are left
    /// out.
    pub fn set_links(&mut self, links: impl IntoIterator<Item = (String, Link)>) {
        let mut broken: Vec<_> = links.into_iter().filter(|(_, link)| link.down > 0).collect();
        broken.sort_by(|(a, x), (b, y)| y.down.cmp(&x.down).then_with(|| a.cmp(b)));
        let mut room = MAX_LINKS;
        self.links = broken
            .into_iter()
            .take_while(|link| {
                // The length of the link in JSON, plus two braces. One of the braces makes up for the comma between links.
                let length = serde_json::to_string(&BTreeMap::from([link.clone()])).map_or(usize::MAX, |t| t.len());
                let fits = length <= room;
                room = room.saturating_sub(length);
                fits
            })
            .collect();
    }

    /// Parses the annotation.
    ///
    /// # Errors
    /// It is too long, or not a JSON object of this form. The error is a message for users.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_AGENT {
            return Err(format!("{} bytes, expected a few hundred", text.len()));
        }
        serde_json::from_str(text).map_err(|error| format!("not what wg-agent writes: {error}"))
    }
}

impl std::fmt::Display for AgentStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| std::fmt::Error)?)
    }
}

/// Parses `host/prefix` and keeps the host bits: `10.4.0.1/16`.
///
/// # Errors
/// The text does not have this form. The error is a message for users.
pub fn host_and_prefix(text: &str) -> Result<IpNet, String> {
    // `parse_network` refuses IPv4-mapped IPv6 addresses, in which an attacker could hide an IPv4 address.
    parse_network(text)
        .and_then(|_| text.parse().map_err(|_| String::new()))
        .map_err(|_| {
            format!(
                "{:?} is not an address and a prefix length, such as 10.4.0.1/16",
                excerpt(text)
            )
        })
}

/// Parses `host:port`, where host is an IPv4 address, an IPv6 address in brackets, or a DNS name.
///
/// # Errors
/// The text does not have this form. The error is a message for users.
pub fn endpoint(text: &str) -> Result<Endpoint, String> {
    let wrong = |what: &str| {
        format!(
            "{:?} {what}: write 192.0.2.1:51820, [2001:db8::1]:51820 or node.example.org:51820",
            excerpt(text)
        )
    };
    let (host, port) = text.rsplit_once(':').ok_or_else(|| wrong("has no port"))?;
    let port = port
        .parse::<u16>()
        .ok()
        .filter(|number| *number > 0 && port.bytes().all(|b| b.is_ascii_digit()))
        .ok_or_else(|| wrong("has no port between 1 and 65535"))?;
    if let Some(inner) = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        let address = inner
            .parse()
            .map_err(|_| wrong("has no IPv6 address in its brackets"))?;
        return Ok(Endpoint::Ip(SocketAddr::new(IpAddr::V6(address), port)));
    }
    endpoint_host(host, port).ok_or_else(|| wrong("has no address or name before the port"))
}

/// The endpoint at an IPv4 address or a DNS name; `None` = `host` is neither.
pub(crate) fn endpoint_host(host: &str, port: u16) -> Option<Endpoint> {
    if let Ok(address) = host.parse() {
        return Some(Endpoint::Ip(SocketAddr::new(IpAddr::V4(address), port)));
    }
    // Resolvers accept `127.1` and `0x7f000001` as addresses, so the last label of a name must not be a number.
    let last = host.rsplit('.').next().unwrap_or_default();
    let is_number = last.bytes().all(|b| b.is_ascii_digit()) || last.starts_with("0x");
    (is_subdomain(host) && !is_number).then(|| Endpoint::Dns(host.to_owned(), port))
}

/// An endpoint in [`KILO_DISCOVERED_ENDPOINTS`]: the JSON form of Go's `net.UDPAddr`.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct UdpAddr {
    #[serde(rename = "IP")]
    ip: String,
    port: i64,
    #[serde(default)]
    zone: String,
}

/// Formats the value of [`KILO_DISCOVERED_ENDPOINTS`].
#[must_use]
pub fn discovered_text(discovered: &BTreeMap<PublicKey, SocketAddr>) -> String {
    // Go's JSON encoder sorts map keys by their text.
    let by_text: BTreeMap<String, UdpAddr> = discovered
        .iter()
        .map(|(key, address)| {
            let ip = address.ip().to_canonical().to_string();
            (
                key.to_string(),
                UdpAddr {
                    ip,
                    port: address.port().into(),
                    zone: String::new(),
                },
            )
        })
        .collect();
    serde_json::to_string(&by_text).unwrap_or_default()
}

/// Parses [`KILO_DISCOVERED_ENDPOINTS`]. Entries that do not parse or have a zone are left out, because the others are
/// useful without them. The map is empty if the text is too long or not a JSON object.
#[must_use]
pub fn discovered(text: &str) -> BTreeMap<PublicKey, SocketAddr> {
    if text.is_empty() || text.len() > MAX_TEXT {
        return BTreeMap::new();
    }
    let entries: BTreeMap<String, serde_json::Value> = serde_json::from_str(text).unwrap_or_default();
    entries
        .into_iter()
        .filter_map(|(key, value)| {
            let address: UdpAddr = serde_json::from_value(value).ok()?;
            let ip: IpAddr = address.ip.parse().ok()?;
            let port = u16::try_from(address.port).ok().filter(|port| *port > 0)?;
            // A zone is valid only on the node that wrote it.
            address.zone.is_empty().then_some(())?;
            Some((key.parse().ok()?, SocketAddr::new(ip.to_canonical(), port)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "F5rh5BOUkcQ1QCw92IwcjvpXs1h3Bi+HFNTJul+WkBU=";

    #[test]
    fn endpoints_are_addresses_or_names_with_a_port() {
        for (text, expected) in [
            ("192.0.2.1:51820", Endpoint::Ip("192.0.2.1:51820".parse().unwrap())),
            ("[2001:db8::1]:1", Endpoint::Ip("[2001:db8::1]:1".parse().unwrap())),
            (
                "node-1.example.org:65535",
                Endpoint::Dns("node-1.example.org".into(), 65535),
            ),
        ] {
            assert_eq!(endpoint(text), Ok(expected));
        }
    }

    #[test]
    fn malformed_endpoint_is_refused_with_an_example() {
        for text in [
            "",
            ":",
            ":51820",
            "192.0.2.1",
            "192.0.2.1:0",
            "192.0.2.1:65536",
            "192.0.2.1:+1",
            "2001:db8::1:51820",
            "[192.0.2.1]:1",
            "[fe80::1%eth0]:1",
            "127.1:1",
            "0x7f000001:1",
            "010.0.0.1:1",
            "-bad_:1",
            "a b:1",
            "é:1",
            "http://x:1",
        ] {
            let why = endpoint(text).expect_err(text);
            assert!(why.contains("write 192.0.2.1:51820"), "{why}");
        }
    }

    #[test]
    fn discovered_endpoints_have_the_json_form_of_go() {
        let found = BTreeMap::from([(KEY.parse().unwrap(), "192.0.2.1:51820".parse().unwrap())]);
        let text = discovered_text(&found);
        assert_eq!(
            text,
            format!(r#"{{"{KEY}":{{"IP":"192.0.2.1","Port":51820,"Zone":""}}}}"#)
        );
        assert_eq!(discovered(&text), found);
    }

    #[test]
    fn malformed_discovered_endpoint_is_left_out() {
        let text = format!(
            r#"{{"{KEY}":{{"IP":"::ffff:192.0.2.1","Port":51820,"Zone":""}},"x":{{"IP":"192.0.2.2","Port":1}},
                "xEcJ1y+L/FVuAcjCMDSXKd7xjr+9ydiO+P+/A17HdVk=":{{"IP":"192.0.2.2","Port":70000}},
                "FOA4Fm2q3jL2DH8YZIflkrM21Se787ICn433LikzC0o=":7}}"#
        );
        assert_eq!(
            discovered(&text),
            BTreeMap::from([(KEY.parse().unwrap(), "192.0.2.1:51820".parse().unwrap())])
        );
        assert_eq!(discovered("{"), BTreeMap::new());
        assert_eq!(discovered("[]"), BTreeMap::new());
    }

    #[test]
    fn annotations_have_kilos_formats() {
        let identity = NodeIdentity {
            public_key: KEY.parse().unwrap(),
            wireguard_ip: "10.4.0.7/16".parse().unwrap(),
            endpoint: Some("[2001:db8::1]:51820".parse().unwrap()),
            internal_ip: None,
            discovered: BTreeMap::new(),
            agent: AgentStatus {
                version: "0.1.0".into(),
                backend: "userspace".into(),
                mode: "full".into(),
                mtu: 1420,
                ..AgentStatus::default()
            },
        };
        assert_eq!(
            identity.annotations(),
            BTreeMap::from([
                ("kilo.squat.ai/key", Some(KEY.to_owned())),
                ("kilo.squat.ai/wireguard-ip", Some("10.4.0.7/16".to_owned())),
                ("kilo.squat.ai/endpoint", Some("[2001:db8::1]:51820".to_owned())),
                ("kilo.squat.ai/internal-ip", Some(String::new())),
                ("kilo.squat.ai/granularity", Some("full".to_owned())),
                ("kilo.squat.ai/discovered-endpoints", None),
                (
                    "kilo-clustermesh.io/agent",
                    Some(r#"{"version":"0.1.0","backend":"userspace","mode":"full","mtu":1420,"peersUp":0,"peersDown":0}"#.to_owned())
                ),
            ])
        );
        assert_eq!(AgentStatus::parse(&identity.agent.to_string()), Ok(identity.agent));
    }

    const fn tunnels(up: u32, down: u32) -> Link {
        Link {
            up,
            down,
            total: up + down,
        }
    }

    #[test]
    fn only_links_with_a_tunnel_down_are_published() {
        let mut agent = AgentStatus::default();
        agent.set_links([
            (member_key("ns", "m", "a"), tunnels(2, 1)),
            (member_key("ns", "m", "b"), tunnels(3, 0)),
        ]);
        let text = agent.to_string();
        assert!(
            text.ends_with(r#","peersDown":0,"links":{"ns/m/a":{"up":2,"down":1,"total":3}}}"#),
            "{text}"
        );
        assert_eq!(AgentStatus::parse(&text), Ok(agent));
    }

    #[test]
    fn annotation_is_bounded_and_contains_the_worst_links() {
        let long = "x".repeat(63);
        let mut agent = AgentStatus {
            version: "10.20.30-rc.1".into(),
            backend: "userspace".into(),
            mode: "policy".into(),
            mtu: u32::MAX,
            policy_revision: "f".repeat(64),
            peers_up: u32::MAX,
            peers_down: u32::MAX,
            datapath_bypassed: "x".repeat(100),
            links: BTreeMap::new(),
        };
        agent.set_links((0..100).map(|n| {
            (
                member_key(&long, &long, &format!("{n:0>63}")),
                tunnels(4_000_000, 1 + n % 7),
            )
        }));
        let text = agent.to_string();
        assert!(text.len() <= MAX_AGENT, "{} bytes", text.len());
        assert!(agent.links.len() > 10, "{} links", agent.links.len());
        let down: std::collections::BTreeSet<u32> = agent.links.values().map(|link| link.down).collect();
        assert_eq!(down, [6, 7].into());
        assert_eq!(AgentStatus::parse(&text), Ok(agent));
    }

    #[test]
    fn malformed_link_is_left_out() {
        let text = r#"{"mode":"full","links":{"ns/m/a":{"up":1,"down":1,"total":2,"more":true},"ns/m/b":{"up":-1},
            "ns/m/c":7,"ns/m/d":{"down":99999999999}}}"#;
        let links = |text| AgentStatus::parse(text).map(|agent| (agent.mode, agent.links));
        assert_eq!(
            links(text),
            Ok(("full".into(), [("ns/m/a".to_owned(), tunnels(1, 1))].into()))
        );
        assert_eq!(
            links(r#"{"mode":"full","links":[3]}"#),
            Ok(("full".into(), BTreeMap::new()))
        );
    }
}
