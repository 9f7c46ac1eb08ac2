//! What a grant by Service comes to on this node: its endpoints here, and why one of them is not opened. How slices are
//! watched, and how they are spelled, is decided elsewhere.
//!
//! An EndpointSlice may be anybody's who may write into that namespace, and holds any address: of a Service without a
//! selector a person writes it by hand. So an address counts only where it is this node's own or one of its pods', whatever
//! the slice says of it, and only for endpoints that are said to be here.

use std::{collections::BTreeSet, fmt, net::IpAddr};

use ipnet::IpNet;

use crate::{compile::Node, policy::Port, policy::Protocol, prefixes::NOT_UNICAST};

/// An EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Slice {
    /// Protocol, name (`""` = the only one) and number of each port.
    pub ports: BTreeSet<(Protocol, String, u16)>,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
}

/// One endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Its addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// The node it is on.
    pub node: Option<String>,
    /// It answers.
    pub serving: bool,
    /// It ends.
    pub terminating: bool,
}

/// What the grants of one policy come to here.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Resolved {
    /// Endpoints that may be reached.
    pub granted: BTreeSet<(IpAddr, Port)>,
    /// Endpoints whose open connections may stay.
    pub draining: BTreeSet<(IpAddr, Port)>,
    /// Addresses of endpoints that are said to be here and are not opened.
    pub refused: BTreeSet<(IpAddr, Refusal)>,
}

/// Why an endpoint stays closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// No packet may be sent there from outside: loopback, link-local, multicast, unspecified.
    NotUnicast,
    /// Neither this node's nor one of its pods'.
    NotHere,
    /// Outside what the cluster has in the mesh.
    Outside,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotUnicast => "is a loopback, link-local, multicast or unspecified address",
            Self::NotHere => {
                "is neither in this node's spec.podCIDRs nor one of its addresses: what was written into an EndpointSlice by \
                 hand, or lies in a pod network that nodes share, is not granted to a sandbox"
            }
            Self::Outside => "lies outside allowedNetworks of this cluster, so it is not granted to a sandbox",
        })
    }
}

/// Adds to `resolved` what a grant comes to on this node. `ports`: protocol and name of those that are granted; empty =
/// every one. `within`: where endpoints may lie.
pub fn resolve<'a>(
    node: &Node,
    ports: &BTreeSet<(Protocol, String)>,
    within: &BTreeSet<IpNet>,
    slices: impl IntoIterator<Item = &'a Slice>,
    resolved: &mut Resolved,
) {
    for slice in slices {
        let granted: BTreeSet<Port> = slice
            .ports
            .iter()
            .filter(|(protocol, name, _)| ports.is_empty() || ports.contains(&(*protocol, name.clone())))
            .map(|(protocol, _, port)| Port {
                protocol: *protocol,
                port: *port,
            })
            .collect();
        for endpoint in &slice.endpoints {
            if endpoint.node.as_deref() != Some(&node.name) || !endpoint.serving {
                continue;
            }
            for address in endpoint.addresses.iter().map(IpAddr::to_canonical) {
                if let Some(why) = refusal(node, within, address) {
                    resolved.refused.insert((address, why));
                    continue;
                }
                let to = if endpoint.terminating {
                    &mut resolved.draining
                } else {
                    &mut resolved.granted
                };
                to.extend(granted.iter().map(|port| (address, *port)));
            }
        }
    }
}

fn refusal(node: &Node, within: &BTreeSet<IpNet>, address: IpAddr) -> Option<Refusal> {
    if NOT_UNICAST.iter().any(|net| net.contains(&address)) {
        return Some(Refusal::NotUnicast);
    }
    let pods = node.pod_cidrs.iter().any(|net: &IpNet| net.contains(&address));
    let own = node.addresses.contains(&address) || node.wireguard_ips.contains(&address);
    if !pods && !own {
        return Some(Refusal::NotHere);
    }
    let inside = within.iter().any(|net| net.contains(&address));
    (!inside).then_some(Refusal::Outside)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::tests::hub_node;

    fn endpoint(address: &str, node: &str, serving: bool, terminating: bool) -> Endpoint {
        Endpoint {
            addresses: [address.parse().unwrap()].into(),
            node: Some(node.to_owned()),
            serving,
            terminating,
        }
    }

    fn port(protocol: Protocol, port: u16) -> Port {
        Port { protocol, port }
    }

    fn slice(endpoints: Vec<Endpoint>) -> Slice {
        let tcp = |name: &str, port| (Protocol::Tcp, name.to_owned(), port);
        Slice {
            ports: [
                tcp("sql", 5432),
                tcp("metrics", 9187),
                (Protocol::Udp, "sql".to_owned(), 5433),
            ]
            .into(),
            endpoints,
        }
    }

    fn granted(ports: &[(Protocol, &str)], slice: &Slice) -> Resolved {
        let ports = ports.iter().map(|(protocol, name)| (*protocol, (*name).to_owned()));
        let mut out = Resolved::default();
        let within = ["10.101.0.0/16", "172.29.0.0/24", "::/0"].map(|net| net.parse().unwrap());
        resolve(&hub_node().node, &ports.collect(), &within.into(), [slice], &mut out);
        out
    }

    #[test]
    fn the_named_ports_of_the_endpoints_on_this_node_are_granted() {
        let slice = slice(vec![
            endpoint("10.101.0.5", "c1n1", true, false),
            endpoint("172.29.0.111", "c1n1", true, false), // host network
            endpoint("10.101.1.5", "c1n2", true, false),
            endpoint("10.101.0.6", "c1n1", false, false),
            Endpoint {
                node: None,
                ..endpoint("10.101.0.7", "", true, false)
            },
        ]);
        let [pod, host] = ["10.101.0.5", "172.29.0.111"].map(|a| a.parse::<IpAddr>().unwrap());
        let sql = port(Protocol::Tcp, 5432);
        let want = Resolved {
            granted: [(pod, sql), (host, sql)].into(),
            ..Resolved::default()
        };
        assert_eq!(granted(&[(Protocol::Tcp, "sql")], &slice), want);
        assert_eq!(granted(&[], &slice).granted.len(), 6, "every port of both");
        assert_eq!(granted(&[(Protocol::Tcp, "none")], &slice), Resolved::default());
    }

    #[test]
    fn what_ends_drains_while_it_serves() {
        let slice = slice(vec![
            endpoint("10.101.0.5", "c1n1", true, true),
            endpoint("10.101.0.6", "c1n1", false, true),
        ]);
        let want = Resolved {
            draining: [("10.101.0.5".parse().unwrap(), port(Protocol::Udp, 5433))].into(),
            ..Resolved::default()
        };
        assert_eq!(granted(&[(Protocol::Udp, "sql")], &slice), want);
    }

    #[test]
    fn an_endpoint_outside_what_the_cluster_has_in_the_mesh_stays_closed() {
        let at = ["10.101.0.5", "172.29.0.111"];
        let slice = slice(at.map(|at| endpoint(at, "c1n1", true, false)).into());
        let [pod, host] = at.map(|at| at.parse::<IpAddr>().unwrap());
        let sql = BTreeSet::from([(Protocol::Tcp, "sql".to_owned())]);
        let of = |within: &[&str]| {
            let within = within.iter().map(|net| net.parse().unwrap()).collect();
            let mut out = Resolved::default();
            resolve(&hub_node().node, &sql, &within, [&slice], &mut out);
            out
        };
        let want = Resolved {
            granted: [(pod, port(Protocol::Tcp, 5432))].into(),
            refused: [(host, Refusal::Outside)].into(),
            ..Resolved::default()
        };
        assert_eq!(of(&["10.101.0.0/16"]), want);
        assert_eq!(of(&[]).granted, BTreeSet::new(), "a policy that says nowhere");
    }

    #[test]
    fn an_address_that_is_not_this_nodes_stays_closed_whatever_a_slice_says() {
        let said = [
            ("127.0.0.1", Refusal::NotUnicast),
            ("169.254.169.254", Refusal::NotUnicast),
            ("224.0.0.1", Refusal::NotUnicast),
            ("0.0.0.0", Refusal::NotUnicast),
            ("255.255.255.255", Refusal::NotUnicast),
            ("::1", Refusal::NotUnicast),
            ("fe80::1", Refusal::NotUnicast),
            ("::ffff:127.0.0.1", Refusal::NotUnicast),
            ("172.29.0.11", Refusal::NotHere),  // the API server
            ("172.29.0.112", Refusal::NotHere), // another node
            ("10.101.1.5", Refusal::NotHere),
            ("192.0.2.1", Refusal::NotHere),
        ];
        let slice = slice(said.iter().map(|(at, _)| endpoint(at, "c1n1", true, false)).collect());
        let refused = said
            .iter()
            .map(|(at, why)| (at.parse::<IpAddr>().unwrap().to_canonical(), *why));
        let want = Resolved {
            refused: refused.collect(),
            ..Resolved::default()
        };
        assert_eq!(granted(&[], &slice), want);
    }
}
