//! Generates scenarios with a sandbox.

use std::collections::{BTreeMap, BTreeSet};

use clustermesh_core::{
    key::PublicKey,
    mesh::{Addressing, Grant, ObjectName, Profile, Protocol},
    observe::{Claim, Endpoint, Gateway, Node, Observation, Server, Service, ServicePort, Slice, SliceEndpoint},
};
use ipnet::IpNet;
use proptest::prelude::*;

use crate::{Scenario, gateway_name, identity, member, scenario};

fn nets(list: &[&str]) -> Vec<IpNet> {
    list.iter().map(|net| net.parse().unwrap()).collect()
}

/// A scenario in which, in every mesh, `c0` and `c1` are cluster-meshed, `c2` is a sandbox with a grant for the Service
/// `ns/granted` of `c0`, and the networks of the three are disjoint. `c0` and `c2` each have a valid node `good`, and a Service
/// `ns/granted` with an endpoint on `good`; wg-agent serves all their nodes. `c0` has a valid gateway. No mesh has
/// previous anchors or accepted networks. Most other values are random.
pub fn sandboxed() -> impl Strategy<Value = Scenario> {
    (scenario(), member(0), member(2)).prop_map(|(mut scenario, hub, sandbox)| {
        for mesh in &mut scenario.meshes {
            mesh.accepted.clear();
            mesh.clusters
                .iter_mut()
                .for_each(|cluster| cluster.previous_anchors.clear());
            mesh.clusters[2].profile = Profile::Sandbox;
            mesh.clusters[2].allowed = nets(&["100.66.2.0/24"]);
            mesh.clusters[2].max_nodes = 5000;
            mesh.clusters[2].egress.push(Grant {
                cluster: "c0".into(),
                service: granted(),
                ports: vec![],
                local: granted(),
            });
            for (cluster, allowed) in mesh.clusters[..2].iter_mut().zip(["10.1.0.0/16", "10.2.0.0/16"]) {
                cluster.profile = Profile::ClusterMeshed;
                cluster.allowed = nets(&[allowed]);
            }
            mesh.clusters[0].addressing = Addressing::Routed;
            mesh.clusters[0].allowed.extend(nets(&["100.66.1.0/24"]));
        }
        for (n, mut member) in [(0, hub), (2, sandbox)] {
            member.policies.get_or_insert_default();
            member.peers.get_or_insert_default();
            member.nodes.values_mut().for_each(|node| node.server = Server::Agent);
            let good = Node {
                created: -1,
                pod_cidrs: vec![Claim::Valid("10.1.9.0/24".parse().unwrap())],
                wireguard_ip: Claim::Valid(format!("100.66.{}.9/24", if n == 0 { 1 } else { 2 }).parse().unwrap()),
                public_key: Claim::Valid(PublicKey::new([50 + n; 32])),
                kilo_endpoint: Claim::Valid(Endpoint::Ip("192.0.2.9:51820".parse().unwrap())),
                server: Server::Agent,
                ..Node::default()
            };
            member.nodes.insert("good".into(), good);
            member.accesses.get_or_insert_default();
            if n == 0 {
                let gateway = Gateway {
                    public_key: PublicKey::new([49; 32]),
                    addresses: ["100.66.1.10".parse().unwrap()].into(),
                    endpoints: vec!["192.0.2.10:51821".parse().unwrap()],
                    serves: BTreeSet::new(),
                    ready: true,
                    exists: true,
                    applied: BTreeMap::new(),
                    refused: BTreeMap::new(),
                };
                member.gateways = [(gateway_name("good"), gateway)].into();
            }
            let port = ServicePort {
                name: "p".into(),
                port: 80,
                protocol: Protocol::Tcp,
            };
            let service = Service {
                ports: vec![port.clone()],
                ..Service::default()
            };
            member.services.insert(granted(), service);
            let backend = SliceEndpoint {
                address: "10.1.9.7".parse().unwrap(),
                node: Some("good".into()),
                ready: true,
                serving: true,
                terminating: false,
            };
            let slice = Slice {
                managed: None,
                service: granted().name,
                v6: false,
                ports: vec![port],
                endpoints: vec![backend],
            };
            member.slices.insert(granted(), slice);
            scenario
                .seen
                .members
                .insert(identity(n.into()), Observation::Fresh(member));
        }
        scenario
    })
}

fn granted() -> ObjectName {
    ObjectName {
        namespace: "ns".into(),
        name: "granted".into(),
    }
}
