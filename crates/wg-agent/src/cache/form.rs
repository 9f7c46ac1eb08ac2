//! How the cache is spelled: a line that says what it is, and one with the values. The types here mirror those of `source`
//! field by field, so that a field added there does not compile before it is kept.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_agent_core::policy::{Policy, Port, Protocol, Rule};
use clustermesh_core::observe::{Endpoint, PeerSpec};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Kept, Live, Saved, Stamp};
use crate::source::objects::{NodeSeen, OwnNode, PeerSeen, PolicySeen};

/// What the first line calls the file.
const FORMAT: &str = "clustermesh wg-agent cache";
/// Another number is another form, and is not read.
const VERSION: u32 = 3;

/// Why a file is not used. None of these can be mended by trying again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unusable {
    /// Cut off, changed, or never ours.
    #[error("it is damaged ({0})")]
    Damaged(String),
    /// Another version's.
    #[error("it has form {0}, and this version reads form {VERSION}")]
    Version(u32),
    /// Another node's.
    #[error("it is that of node {0:?}")]
    OtherNode(String),
    /// Nobody has confirmed it for too long.
    #[error(
        "the API server confirmed it last at {0}, which is longer ago than --cache-max-age ({1:#}): Peers that were deleted since \
         would come back"
    )]
    Old(Stamp, jiff::SignedDuration),
    /// Others could have written it.
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
    peers: BTreeMap<String, PeerForm>,
    policies: BTreeMap<String, PolicyForm>,
    nodes: BTreeMap<String, NodeForm>,
    api_servers: BTreeMap<String, BTreeSet<SocketAddr>>,
    addresses: BTreeMap<String, IpAddr>,
    live: BTreeMap<String, SocketAddr>,
    confirmed: Stamp,
}

/// The values of a file.
pub(super) struct Values {
    pub(super) saved: Saved,
    pub(super) live: Live,
    pub(super) confirmed: Stamp,
}

/// The file's text.
pub(super) fn write(node: &str, kept: &Kept) -> Result<String, serde_json::Error> {
    let empty = Saved::default();
    let Saved {
        peers,
        policies,
        nodes,
        api_servers,
        addresses,
    } = kept.saved.as_deref().unwrap_or(&empty);
    let named = |(name, peer): (&String, &PeerSeen)| Some((name.clone(), PeerForm::of(peer)?));
    let body = serde_json::to_string(&Body {
        peers: peers.iter().filter_map(named).collect(),
        policies: policies
            .iter()
            .map(|(name, policy)| (name.clone(), PolicyForm::of(policy)))
            .collect(),
        nodes: nodes
            .iter()
            .map(|(name, node)| (name.clone(), NodeForm::of(node)))
            .collect(),
        api_servers: api_servers.clone(),
        addresses: addresses.clone(),
        live: kept.live.iter().map(|(key, at)| (key.to_string(), *at)).collect(),
        confirmed: kept.confirmed,
    })?;
    let head = serde_json::to_string(&Head {
        format: FORMAT.to_owned(),
        version: VERSION,
        node: node.to_owned(),
        sha256: hash(&body),
    })?;
    Ok(format!("{head}\n{body}\n"))
}

/// The values of a file of this node, or why it is not used.
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
        let saved = Saved {
            peers: all(peers, PeerForm::value)?,
            policies: all(policies, PolicyForm::value)?,
            nodes: nodes.into_iter().map(|(name, node)| (name, node.value())).collect(),
            api_servers,
            addresses,
        };
        let live = live.into_iter().map(|(key, at)| Ok((key.parse()?, at)));
        let live: Result<Live, clustermesh_core::key::KeyError> = live.collect();
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

/// Without `requires-policy`: a Peer that has it is not kept.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerForm {
    cluster: String,
    mesh: (String, String),
    revision: u64,
    public_key: String,
    allowed_ips: BTreeSet<IpNet>,
    endpoint: Option<EndpointForm>,
    candidates: Vec<SocketAddr>,
    persistent_keepalive: u16,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum EndpointForm {
    Ip(SocketAddr),
    Name { name: String, port: u16 },
}

impl EndpointForm {
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

impl PeerForm {
    fn of(peer: &PeerSeen) -> Option<Self> {
        let PeerSeen {
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
            endpoint: endpoint.as_ref().map(EndpointForm::of),
            candidates: candidates.clone(),
            persistent_keepalive: *persistent_keepalive,
        })
    }

    fn value(self) -> Result<PeerSeen, String> {
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
        Ok(PeerSeen {
            cluster,
            mesh,
            revision,
            spec: Ok(PeerSpec {
                public_key: public_key
                    .parse()
                    .map_err(|e: clustermesh_core::key::KeyError| e.to_string())?,
                allowed_ips,
                endpoint: endpoint.map(EndpointForm::value),
                candidates,
                persistent_keepalive,
            }),
        })
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyForm {
    name: String,
    sources: BTreeSet<IpNet>,
    networks: BTreeSet<IpNet>,
    allow: Vec<RuleForm>,
    deny: Vec<RuleForm>,
    infrastructure_ports: BTreeSet<(ProtocolForm, u16)>,
    anchored: BTreeSet<IpNet>,
    closed: bool,
    problem: Option<String>,
    digest: [u8; 8],
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleForm {
    to: BTreeSet<IpNet>,
    ports: BTreeSet<(ProtocolForm, u16)>,
}

#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "lowercase")]
enum ProtocolForm {
    Tcp,
    Udp,
    Sctp,
}

fn port(port: &Port) -> (ProtocolForm, u16) {
    let protocol = match port.protocol {
        Protocol::Tcp => ProtocolForm::Tcp,
        Protocol::Udp => ProtocolForm::Udp,
        Protocol::Sctp => ProtocolForm::Sctp,
    };
    (protocol, port.port)
}

fn port_value((protocol, port): (ProtocolForm, u16)) -> Port {
    let protocol = match protocol {
        ProtocolForm::Tcp => Protocol::Tcp,
        ProtocolForm::Udp => Protocol::Udp,
        ProtocolForm::Sctp => Protocol::Sctp,
    };
    Port { protocol, port }
}

impl RuleForm {
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

impl PolicyForm {
    fn of(seen: &PolicySeen) -> Self {
        let PolicySeen {
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
            allow: allow.iter().map(RuleForm::of).collect(),
            deny: deny.iter().map(RuleForm::of).collect(),
            infrastructure_ports: infrastructure_ports.iter().map(port).collect(),
            anchored: anchored.clone(),
            closed: *closed,
            problem: problem.clone(),
            digest: *digest,
        }
    }

    fn value(self) -> Result<PolicySeen, String> {
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
        Ok(PolicySeen {
            policy: Policy {
                name,
                sources,
                networks,
                allow: allow.into_iter().map(RuleForm::value).collect(),
                deny: deny.into_iter().map(RuleForm::value).collect(),
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
struct NodeForm {
    created: i64,
    wireguard_ip: Option<IpAddr>,
    internal_ips: Vec<IpAddr>,
    pod_cidrs: BTreeSet<IpNet>,
    own: Option<OwnForm>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnForm {
    external_ips: Vec<IpAddr>,
    force_endpoint: Option<EndpointForm>,
}

impl NodeForm {
    fn of(node: &NodeSeen) -> Self {
        let NodeSeen {
            created,
            wireguard_ip,
            internal_ips,
            pod_cidrs,
            own,
        } = node;
        let own = own.as_ref().map(|own| {
            // What was published, and when kg was seen, is only true of the moment.
            let OwnNode {
                external_ips,
                force_endpoint,
                kg_seen: _,
                published: _,
            } = own;
            OwnForm {
                external_ips: external_ips.clone(),
                force_endpoint: force_endpoint.as_ref().map(EndpointForm::of),
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

    fn value(self) -> NodeSeen {
        let Self {
            created,
            wireguard_ip,
            internal_ips,
            pod_cidrs,
            own,
        } = self;
        let own = own.map(|own| {
            let OwnForm {
                external_ips,
                force_endpoint,
            } = own;
            OwnNode {
                external_ips,
                force_endpoint: force_endpoint.map(EndpointForm::value),
                ..OwnNode::default()
            }
        });
        NodeSeen {
            created,
            wireguard_ip,
            internal_ips,
            pod_cidrs,
            own,
        }
    }
}
