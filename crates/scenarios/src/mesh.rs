//! Generates ClusterMeshes and their entries.

use std::collections::BTreeMap;

use clustermesh_core::mesh::{Addressing, Cluster, Grant, Locations, Mesh, MeshId, ObjectName, PodNetwork, Profile};
use ipnet::IpNet;
use proptest::{
    collection, option,
    prelude::*,
    sample::{self, select},
};

use crate::{
    identity,
    values::{net, own_wireguard, parse},
};

fn cluster(n: usize) -> impl Strategy<Value = Cluster> {
    let pods = format!("10.{}.0.0/16", n + 1);
    let services = format!("10.{}.0.0/16", 96 + n);
    let wireguard = own_wireguard(n, 0).trunc();
    let hosts = [
        format!("172.30.{}.0/24", n + 1),
        format!("172.30.{}.1/32", n + 1),
        format!("fd00:{}::/48", n + 1),
    ];
    let more: Vec<IpNet> = [services].into_iter().chain(hosts).map(parse).collect();
    let own = sample::subsequence(more, 0..=3).prop_map(move |mut own| {
        own.extend([parse(pods.clone()), wireguard]);
        own
    });
    let shape = (
        prop_oneof![
            8 => Just(Profile::ClusterMeshed),
            1 => Just(Profile::Sandbox),
            1 => Just(Profile::Standard),
        ],
        prop_oneof![4 => Just(Addressing::Routed), 1 => Just(Addressing::Masqueraded)],
        prop_oneof![20 => own, 1 => collection::vec(net(), 1..4)],
        option::weighted(0.2, collection::vec(net(), 0..2)),
        0u16..4,
        prop_oneof![4 => Just(PodNetwork::PerNode), 1 => Just(PodNetwork::Shared)],
        collection::vec(net(), 0..2),
        (
            prop::bool::weighted(0.1),
            prop_oneof![2 => Just(Locations::Ignored), 1 => Just(Locations::Connected)],
        ),
    );
    let grant = (0usize..3, select(&["s", "t"][..])).prop_map(|(cluster, name)| Grant {
        cluster: format!("c{cluster}"),
        service: ObjectName {
            namespace: "ns".into(),
            name: name.into(),
        },
        ports: vec![],
        local: ObjectName {
            namespace: "ns".into(),
            name: name.into(),
        },
    });
    (
        shape,
        collection::vec(grant, 0..3),
        prop_oneof![4 => Just(5000), 1 => 1usize..3],
        select(&[0u16, 15][..]),
    )
        .prop_map(move |(shape, egress, max_nodes, persistent_keepalive)| {
            let (profile, addressing, allowed, anchored, anchors, pod_network, endpoint_networks, rest) = shape;
            let (quarantine, locations) = rest;
            Cluster {
                name: format!("c{n}"),
                identity: identity(n),
                profile,
                addressing,
                allowed,
                anchored,
                previous_anchors: BTreeMap::new(),
                anchors,
                pod_network,
                locations,
                exports: vec![],
                wireguard_port: 51820,
                persistent_keepalive,
                endpoint_networks,
                egress,
                quarantine,
                confined_to: None,
                max_nodes,
            }
        })
}

pub(crate) fn mesh() -> BoxedStrategy<Mesh> {
    let accepted = collection::btree_map(
        select(&["c0", "c1", "c2"][..]).prop_map(str::to_owned),
        collection::vec(net(), 0..3),
        0..3,
    );
    let accepted = prop_oneof![9 => Just(BTreeMap::new()), 1 => accepted];
    let parts = (
        (select(&["one", "two"][..]), select(&["m", "n"][..])),
        0i64..3,
        prop_oneof![9 => Just(false), 1 => Just(true)],
        prop_oneof![9 => Just(false), 1 => Just(true)],
        (cluster(0), cluster(1), cluster(2)),
        accepted,
    );
    let mesh = parts.prop_map(
        |((namespace, name), created, paused, deleting, (a, b, c), accepted)| Mesh {
            id: MeshId {
                namespace: namespace.into(),
                name: name.into(),
            },
            created,
            paused,
            deleting,
            adopt_hub: None,
            clusters: vec![a, b, c],
            accepted,
        },
    );
    mesh.boxed()
}
