//! Defines the format of the cache: a header line in JSON, and a line with the values. The types mirror those of
//! `source` field by field: a field added there does not compile until it is handled here.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_agent_core::policy::{Policy, Port, Rule};
use clustermesh_core::{
    mesh::Protocol,
    observe::{Endpoint, PeerSpec},
};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{CacheContent, LiveEndpoints, SavedObjects, UnixTime};
use crate::source::objects::{OwnNode, ParsedNode, ParsedPeer, ParsedPolicy};

/// The format's name in the header.
const FORMAT: &str = "clustermesh wg-agent cache";
/// The format version; a file of another version is not read.
const VERSION: u32 = 4;

/// Why a file is not used. Retrying helps with none of these.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unusable {
    /// Truncated, changed, or not written by an agent.
    #[error("it is damaged ({0})")]
    Damaged(String),
    /// Another format version.
    #[error("it has format version {0}, and this agent reads version {VERSION}")]
    Version(u32),
    /// Written for another node.
    #[error("it was written for node {0:?}")]
    OtherNode(String),
    /// Not confirmed by the API server for too long.
    #[error(
        "the API server confirmed it last at {0}, which is longer ago than --cache-max-age ({1:#}): Peers that were deleted since \
         would come back"
    )]
    Old(UnixTime, jiff::SignedDuration),
    /// Others could read or write the file.
    #[error("others could read or change it ({0})")]
    Exposed(String),
}

#[derive(Serialize, Deserialize)]
struct Head {
    format: String,
    version: u32,
    #[serde(default)]
    node: String,
    #[serde(default)]
    sha256: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    peers: BTreeMap<String, PeerRecord>,
    policies: BTreeMap<String, PolicyRecord>,
    nodes: BTreeMap<String, NodeRecord>,
    api_servers: BTreeMap<String, BTreeSet<SocketAddr>>,
    addresses: BTreeMap<String, IpAddr>,
    live: BTreeMap<String, SocketAddr>,
    confirmed: UnixTime,
}

/// The values of a file.
pub(super) struct Values {
    pub(super) saved: SavedObjects,
    pub(super) live: LiveEndpoints,
    pub(super) confirmed: UnixTime,
}

/// Encodes the file.
pub(super) fn write(node: &str, content: &CacheContent) -> Result<String, serde_json::Error> {
    let empty = SavedObjects::default();
    let SavedObjects {
        peers,
        policies,
        nodes,
        api_servers,
        addresses,
    } = content.saved.as_deref().unwrap_or(&empty);
    let named = |(name, peer): (&String, &ParsedPeer)| Some((name.clone(), PeerRecord::of(peer)?));
    let body = serde_json::to_string(&Body {
        peers: peers.iter().filter_map(named).collect(),
        policies: policies
            .iter()
            .map(|(name, policy)| (name.clone(), PolicyRecord::of(policy)))
            .collect(),
        nodes: nodes
            .iter()
            .map(|(name, node)| (name.clone(), NodeRecord::of(node)))
            .collect(),
        api_servers: api_servers.clone(),
        addresses: addresses.clone(),
        live: content.live.iter().map(|(key, at)| (key.to_string(), *at)).collect(),
        confirmed: content.confirmed,
    })?;
    let head = serde_json::to_string(&Head {
        format: FORMAT.to_owned(),
        version: VERSION,
        node: node.to_owned(),
        sha256: hash(&body),
    })?;
    Ok(format!("{head}\n{body}\n"))
}

/// Decodes a file of this node.
pub(super) fn read(node: &str, text: &str) -> Result<Values, Unusable> {
    let damaged = |why: &dyn std::fmt::Display| Unusable::Damaged(why.to_string());
    let (head, body) = text.split_once('\n').ok_or_else(|| damaged(&"it is cut off"))?;
    let head: Head = serde_json::from_str(head).map_err(|e| damaged(&e))?;
    if head.format != FORMAT {
        return Err(damaged(&"it is no cache of wg-agent"));
    }
    if head.version != VERSION {
        return Err(Unusable::Version(head.version));
    }
    if head.node != node {
        return Err(Unusable::OtherNode(head.node));
    }
    let body = body.trim_end_matches('\n');
    if hash(body) != head.sha256 {
        return Err(damaged(&"its checksum does not match"));
    }
    let body: Body = serde_json::from_str(body).map_err(|e| damaged(&e))?;
    let Body {
        peers,
        policies,
        nodes,
        api_servers,
        addresses,
        live,
        confirmed,
    } = body;
    let values = || -> Result<Values, String> {
        let saved = SavedObjects {
            peers: all(peers, PeerRecord::value)?,
            policies: all(policies, PolicyRecord::value)?,
            nodes: nodes.into_iter().map(|(name, node)| (name, node.value())).collect(),
            api_servers,
            addresses,
        };
        let live = live.into_iter().map(|(key, at)| Ok((key.parse()?, at)));
        let live: Result<LiveEndpoints, clustermesh_core::key::KeyError> = live.collect();
        Ok(Values {
            saved,
            live: live.map_err(|e| e.to_string())?,
            confirmed,
        })
    };
    values().map_err(|e| damaged(&e))
}

fn all<F, V>(forms: BTreeMap<String, F>, value: fn(F) -> Result<V, String>) -> Result<BTreeMap<String, V>, String> {
    forms.into_iter().map(|(name, form)| Ok((name, value(form)?))).collect()
}

fn hash(text: &str) -> String {
    let sum = Sha256::digest(text.as_bytes());
    sum.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A Peer's values.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerRecord {
    cluster: String,
    mesh: (String, String),
    revision: u64,
    public_key: String,
    allowed_ips: BTreeSet<IpNet>,
    endpoint: Option<EndpointRecord>,
    candidates: Vec<SocketAddr>,
    persistent_keepalive: u16,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum EndpointRecord {
    Ip(SocketAddr),
    Name { name: String, port: u16 },
}

impl EndpointRecord {
    fn of(endpoint: &Endpoint) -> Self {
        match endpoint {
            Endpoint::Ip(at) => Self::Ip(*at),
            Endpoint::Dns(name, port) => Self::Name {
                name: name.clone(),
                port: *port,
            },
        }
    }

    fn value(self) -> Endpoint {
        match self {
            Self::Ip(at) => Endpoint::Ip(at),
            Self::Name { name, port } => Endpoint::Dns(name, port),
        }
    }
}

impl PeerRecord {
    fn of(peer: &ParsedPeer) -> Option<Self> {
        let ParsedPeer {
            cluster,
            mesh,
            revision,
            spec: Ok(spec),
        } = peer
        else {
            return None;
        };
        let PeerSpec {
            public_key,
            allowed_ips,
            endpoint,
            candidates,
            persistent_keepalive,
        } = spec;
        Some(Self {
            cluster: cluster.clone(),
            mesh: mesh.clone(),
            revision: *revision,
            public_key: public_key.to_string(),
            allowed_ips: allowed_ips.clone(),
            endpoint: endpoint.as_ref().map(EndpointRecord::of),
            candidates: candidates.clone(),
            persistent_keepalive: *persistent_keepalive,
        })
    }

    fn value(self) -> Result<ParsedPeer, String> {
        let Self {
            cluster,
            mesh,
            revision,
            public_key,
            allowed_ips,
            endpoint,
            candidates,
            persistent_keepalive,
        } = self;
        Ok(ParsedPeer {
            cluster,
            mesh,
            revision,
            spec: Ok(PeerSpec {
                public_key: public_key
                    .parse()
                    .map_err(|e: clustermesh_core::key::KeyError| e.to_string())?,
                allowed_ips,
                endpoint: endpoint.map(EndpointRecord::value),
                candidates,
                persistent_keepalive,
            }),
        })
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyRecord {
    name: String,
    sources: BTreeSet<IpNet>,
    networks: BTreeSet<IpNet>,
    allow: Vec<RuleRecord>,
    deny: Vec<RuleRecord>,
    infrastructure_ports: BTreeSet<(Protocol, u16)>,
    anchored: BTreeSet<IpNet>,
    closed: bool,
    problem: Option<String>,
    digest: [u8; 8],
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleRecord {
    to: BTreeSet<IpNet>,
    ports: BTreeSet<(Protocol, u16)>,
}

fn port(port: &Port) -> (Protocol, u16) {
    (port.protocol, port.port)
}

fn port_value((protocol, port): (Protocol, u16)) -> Port {
    Port { protocol, port }
}

impl RuleRecord {
    fn of(rule: &Rule) -> Self {
        let Rule { to, ports } = rule;
        Self {
            to: to.clone(),
            ports: ports.iter().map(port).collect(),
        }
    }

    fn value(self) -> Rule {
        let Self { to, ports } = self;
        Rule {
            to,
            ports: ports.into_iter().map(port_value).collect(),
        }
    }
}

impl PolicyRecord {
    fn of(seen: &ParsedPolicy) -> Self {
        let ParsedPolicy {
            policy,
            problem,
            digest,
        } = seen;
        let Policy {
            name,
            sources,
            networks,
            allow,
            deny,
            infrastructure_ports,
            anchored,
            closed,
        } = policy;
        Self {
            name: name.clone(),
            sources: sources.clone(),
            networks: networks.clone(),
            allow: allow.iter().map(RuleRecord::of).collect(),
            deny: deny.iter().map(RuleRecord::of).collect(),
            infrastructure_ports: infrastructure_ports.iter().map(port).collect(),
            anchored: anchored.clone(),
            closed: *closed,
            problem: problem.clone(),
            digest: *digest,
        }
    }

    fn value(self) -> Result<ParsedPolicy, String> {
        let Self {
            name,
            sources,
            networks,
            allow,
            deny,
            infrastructure_ports,
            anchored,
            closed,
            problem,
            digest,
        } = self;
        Ok(ParsedPolicy {
            policy: Policy {
                name,
                sources,
                networks,
                allow: allow.into_iter().map(RuleRecord::value).collect(),
                deny: deny.into_iter().map(RuleRecord::value).collect(),
                infrastructure_ports: infrastructure_ports.into_iter().map(port_value).collect(),
                anchored,
                closed,
            },
            problem,
            digest,
        })
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeRecord {
    created: i64,
    wireguard_ip: Option<IpAddr>,
    internal_ips: Vec<IpAddr>,
    pod_cidrs: BTreeSet<IpNet>,
    own: Option<OwnRecord>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnRecord {
    external_ips: Vec<IpAddr>,
    force_endpoint: Option<EndpointRecord>,
}

impl NodeRecord {
    fn of(node: &ParsedNode) -> Self {
        let ParsedNode {
            created,
            wireguard_ip,
            internal_ips,
            pod_cidrs,
            own,
        } = node;
        let own = own.as_ref().map(|own| {
            // The published annotations and kg's last-seen time are only true for the moment.
            let OwnNode {
                external_ips,
                force_endpoint,
                kg_seen: _,
                published: _,
            } = own;
            OwnRecord {
                external_ips: external_ips.clone(),
                force_endpoint: force_endpoint.as_ref().map(EndpointRecord::of),
            }
        });
        Self {
            created: *created,
            wireguard_ip: *wireguard_ip,
            internal_ips: internal_ips.clone(),
            pod_cidrs: pod_cidrs.clone(),
            own,
        }
    }

    fn value(self) -> ParsedNode {
        let Self {
            created,
            wireguard_ip,
            internal_ips,
            pod_cidrs,
            own,
        } = self;
        let own = own.map(|own| {
            let OwnRecord {
                external_ips,
                force_endpoint,
            } = own;
            OwnNode {
                external_ips,
                force_endpoint: force_endpoint.map(EndpointRecord::value),
                ..OwnNode::default()
            }
        });
        ParsedNode {
            created,
            wireguard_ip,
            internal_ips,
            pod_cidrs,
            own,
        }
    }
}
