use serde_json::{Value, json};

use super::*;
use crate::mesh::ClusterMesh;

fn object(spec: Value) -> ClusterMesh {
    serde_json::from_value(json!({
        "apiVersion": "kilo.squat.ai/v1alpha1",
        "kind": "ClusterMesh",
        "metadata": {"name": "prod", "namespace": "team", "creationTimestamp": "1970-01-01T00:00:09Z"},
        "spec": spec,
    }))
    .unwrap()
}

fn two_clusters() -> Value {
    json!({"clusters": [
        {"name": "mgmt", "local": true, "allowedNetworks": ["10.244.0.0/16", "10.96.0.0/12"]},
        {"name": "tenant-a", "kubeconfigSecretRef": {"name": "tenant-a"}, "allowedNetworks": ["10.20.0.0/16"]},
    ]})
}

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn default_cluster(name: &str, identity: core::ClusterIdentity, allowed: &[&str]) -> core::Cluster {
    core::Cluster {
        name: name.into(),
        identity,
        profile: core::Profile::ClusterMeshed,
        addressing: core::Addressing::Routed,
        allowed: nets(allowed),
        anchored: None,
        previous_anchors: BTreeMap::new(),
        anchors: 1,
        pod_network: core::PodNetwork::PerNode,
        exports: Vec::new(),
        wireguard_port: 51820,
        persistent_keepalive: 0,
        locations: core::Locations::Ignored,
        endpoint_networks: Vec::new(),
        egress: Vec::new(),
        quarantine: false,
        confined_to: None,
        max_nodes: 5_000,
    }
}

fn secret(name: &str, key: &str, context: Option<&str>) -> core::ClusterIdentity {
    core::ClusterIdentity::Secret {
        namespace: "team".into(),
        name: name.into(),
        key: key.into(),
        context: context.map(Into::into),
    }
}

#[test]
fn minimal_mesh_gets_the_documented_defaults() {
    let expected = core::Mesh {
        id: core::MeshId {
            namespace: "team".into(),
            name: "prod".into(),
        },
        created: 9,
        paused: false,
        deleting: false,
        adopt_hub: None,
        clusters: vec![
            default_cluster("mgmt", core::ClusterIdentity::Local, &["10.244.0.0/16", "10.96.0.0/12"]),
            default_cluster("tenant-a", secret("tenant-a", "value", None), &["10.20.0.0/16"]),
        ],
        accepted: BTreeMap::new(),
    };
    assert_eq!(to_core(&object(two_clusters())), Ok((expected, Vec::new())));
}

#[test]
fn every_field_is_converted() {
    let mut mesh = object(json!({"paused": true, "clusters": [
        {"name": "mgmt", "local": true, "allowedNetworks": ["10.244.0.0/16", "10.96.0.0/12"],
         "anchoredNetworks": ["10.96.0.0/12"], "anchors": 2, "locations": "Connected", "podNetwork": "Shared",
         "exports": [{"namespace": "rook-ceph", "podSelector": {
            "matchLabels": {"app": "rook-ceph-osd"},
            "matchExpressions": [
                {"key": "a", "operator": "In", "values": ["x", "y"]}, {"key": "b", "operator": "NotIn", "values": ["z"]},
                {"key": "c", "operator": "Exists"}, {"key": "d", "operator": "DoesNotExist"}]}}],
         "wireguardPort": 51821, "persistentKeepalive": 25},
        {"name": "tenant-a", "kubeconfigSecretRef": {"name": "kc", "key": "super-admin.svc", "context": "admin@tenant-a"},
         "addressing": "Masqueraded", "allowedNetworks": ["10.20.0.0/16"], "endpointNetworks": ["10.244.0.0/16"],
         "egress": [
            {"service": {"cluster": "mgmt", "namespace": "team-x", "name": "postgres-rw"},
             "ports": [{"port": 5432}, {"port": "metrics", "protocol": "UDP"}], "as": {"namespace": "default", "name": "postgres"}},
            {"service": {"cluster": "mgmt", "namespace": "team-x", "name": "redis"}, "as": {"name": "cache"}}]},
        {"name": "notebooks", "kubeconfigSecretRef": {"name": "nb"}, "isolationProfile": "sandbox", "quarantine": true,
         "allowedNetworks": ["100.80.16.0/20"]},
        {"name": "later", "kubeconfigSecretRef": {"name": "later"}, "isolationProfile": "standard", "allowedNetworks": ["fd00::/48"]},
    ]}));
    mesh.metadata.annotations = Some([(ADOPT_HUB.to_owned(), "old-hub".to_owned())].into());
    mesh.metadata.deletion_timestamp = mesh.metadata.creation_timestamp.clone();
    mesh.status = serde_json::from_value(json!({"clusters": [
        {"name": "mgmt", "acceptedNetworks": ["10.244.0.0/16"], "registeredPeers": 3, "skippedNodes": 1,
         "anchored": [{"network": "10.96.0.0/12", "nodes": ["n1", "n2"]}, {"network": "10.0.0.0/24"}]}, {"name": "tenant-a"}]})).unwrap();
    let (converted, warnings) = to_core(&mesh).unwrap();
    assert_eq!(warnings, Vec::new());
    assert!(converted.paused && converted.deleting);
    assert_eq!(converted.adopt_hub.as_deref(), Some("old-hub"));
    assert_eq!(
        converted.accepted,
        BTreeMap::from([("mgmt".to_owned(), nets(&["10.244.0.0/16"]))])
    );
    let name = |namespace: &str, name: &str| core::ObjectName {
        namespace: namespace.into(),
        name: name.into(),
    };
    assert_eq!(
        converted.clusters,
        vec![
            core::Cluster {
                anchored: Some(nets(&["10.96.0.0/12"])),
                previous_anchors: [
                    ("10.0.0.0/24", vec![]),
                    ("10.96.0.0/12", vec!["n1".to_owned(), "n2".to_owned()]),
                ]
                .map(|(net, nodes)| (net.parse().unwrap(), nodes.into_iter().collect()))
                .into(),
                anchors: 2,
                locations: core::Locations::Connected,
                pod_network: core::PodNetwork::Shared,
                exports: vec![core::Export {
                    namespace: "rook-ceph".into(),
                    selector: vec![
                        core::Requirement::In("app".into(), vec!["rook-ceph-osd".into()]),
                        core::Requirement::In("a".into(), vec!["x".into(), "y".into()]),
                        core::Requirement::NotIn("b".into(), vec!["z".into()]),
                        core::Requirement::Exists("c".into()),
                        core::Requirement::DoesNotExist("d".into()),
                    ],
                }],
                wireguard_port: 51821,
                persistent_keepalive: 25,
                ..default_cluster("mgmt", core::ClusterIdentity::Local, &["10.244.0.0/16", "10.96.0.0/12"])
            },
            core::Cluster {
                addressing: core::Addressing::Masqueraded,
                endpoint_networks: nets(&["10.244.0.0/16"]),
                egress: vec![
                    core::Grant {
                        cluster: "mgmt".into(),
                        service: name("team-x", "postgres-rw"),
                        ports: vec![
                            core::GrantPort {
                                port: core::PortRef::Number(5432),
                                protocol: core::Protocol::Tcp
                            },
                            core::GrantPort {
                                port: core::PortRef::Name("metrics".into()),
                                protocol: core::Protocol::Udp
                            },
                        ],
                        local: name("default", "postgres"),
                    },
                    core::Grant {
                        cluster: "mgmt".into(),
                        service: name("team-x", "redis"),
                        ports: Vec::new(),
                        local: name("team-x", "cache"),
                    },
                ],
                ..default_cluster(
                    "tenant-a",
                    secret("kc", "super-admin.svc", Some("admin@tenant-a")),
                    &["10.20.0.0/16"]
                )
            },
            core::Cluster {
                profile: core::Profile::Sandbox,
                addressing: core::Addressing::Masqueraded,
                quarantine: true,
                confined_to: None,
                ..default_cluster("notebooks", secret("nb", "value", None), &["100.80.16.0/20"])
            },
            core::Cluster {
                profile: core::Profile::Standard,
                ..default_cluster("later", secret("later", "value", None), &["fd00::/48"])
            },
        ]
    );
}

/// The mesh is like one that a user's Helm chart may render: the tenant clusters of one namespace, without the hub.
#[test]
fn mesh_without_local_entry_is_accepted() {
    let mut spec = two_clusters();
    spec["clusters"][0] = json!({
        "name": "kubernetes-a", "kubeconfigSecretRef": {"name": "kubernetes-a-admin-kubeconfig", "key": "super-admin.conf"},
        "allowedNetworks": ["10.243.0.0/17", "10.95.0.0/17", "100.65.1.0/24"], "wireguardPort": 51820, "persistentKeepalive": 25,
    });
    let (converted, warnings) = to_core(&object(spec)).unwrap();
    assert_eq!(warnings, Vec::new());
    let first = core::Cluster {
        persistent_keepalive: 25,
        ..default_cluster(
            "kubernetes-a",
            secret("kubernetes-a-admin-kubeconfig", "super-admin.conf", None),
            &["10.243.0.0/17", "10.95.0.0/17", "100.65.1.0/24"],
        )
    };
    assert_eq!(converted.clusters[0], first);
    assert!(
        converted
            .clusters
            .iter()
            .all(|entry| entry.identity != core::ClusterIdentity::Local)
    );
}

#[test]
fn paused_annotation_pauses_unless_it_is_false() {
    for (value, paused) in [("", true), ("true", true), ("false", false)] {
        let mut mesh = object(two_clusters());
        mesh.metadata.annotations = Some([(PAUSED.to_owned(), value.to_owned())].into());
        assert_eq!(to_core(&mesh).unwrap().0.paused, paused, "{value:?}");
    }
}

#[test]
fn ignored_and_changed_values_cause_warnings() {
    let mut spec = two_clusters();
    spec["clusters"][0]["allowedNetworks"] = json!(["10.244.3.9/16", "10.244.0.0/16"]);
    spec["clusters"][0]["kubeconfigSecretRef"] = json!({"name": "unused"});
    spec["clusters"][1]["exports"] = json!([{"namespace": "a"}]);
    let (converted, warnings) = to_core(&object(spec)).unwrap();
    assert_eq!(converted.clusters[0].allowed, nets(&["10.244.0.0/16"]));
    assert_eq!(
        warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [
            "ClusterMesh team/prod: spec.clusters[0].allowedNetworks[0]: 10.244.3.9/16 has host bits and is read as 10.244.0.0/16",
            "ClusterMesh team/prod: spec.clusters[0].allowedNetworks[1]: 10.244.0.0/16 is listed twice",
            "ClusterMesh team/prod: spec.clusters[0].kubeconfigSecretRef: is not used: `local: true` means the cluster this object lives in",
            "ClusterMesh team/prod: spec.clusters[1].exports: is not used while podNetwork is PerNode: set `podNetwork: Shared` if pods have no addresses from their node's podCIDRs",
        ]
    );
}

#[test]
fn problem_names_the_invalid_field() {
    let grant = |cluster: &str, name: &str| json!({"service": {"cluster": cluster, "namespace": "d", "name": name}});
    let grant_with_port = |port: Value| json!([{"service": {"cluster": "mgmt", "namespace": "d", "name": "s"}, "ports": [{"port": port}]}]);
    let cases = [
        (
            "/clusters/1/name",
            json!("A"),
            "spec.clusters[1].name: \"A\" is not a DNS-1123 label",
        ),
        (
            "/clusters/1/name",
            json!("mgmt"),
            "spec.clusters[1].name: \"mgmt\" is the name of an earlier entry",
        ),
        (
            "/clusters/1/local",
            json!(true),
            "spec.clusters: more than one entry has `local: true`: only the cluster this object lives in may",
        ),
        (
            "/clusters/1/kubeconfigSecretRef",
            json!(null),
            "spec.clusters[1].kubeconfigSecretRef: is missing",
        ),
        (
            "/clusters/1/kubeconfigSecretRef/name",
            json!("../x"),
            "spec.clusters[1].kubeconfigSecretRef.name: \"../x\" is not the name",
        ),
        (
            "/clusters/1/allowedNetworks",
            json!([]),
            "spec.clusters[1].allowedNetworks: is empty",
        ),
        (
            "/clusters/1/allowedNetworks/0",
            json!("10.0.0.1"),
            "spec.clusters[1].allowedNetworks[0]: \"10.0.0.1\" is not a network",
        ),
        (
            "/clusters/1/allowedNetworks/0",
            json!("::ffff:10.0.0.0/104"),
            "spec.clusters[1].allowedNetworks[0]: \"::ffff:10.0.0.0/104\" is an IPv4 network written as IPv6",
        ),
        (
            "/clusters/1/allowedNetworks/0",
            json!("128.0.0.0/1"),
            "spec.clusters[1].allowedNetworks: 128.0.0.0/1 is wider than /8 (IPv4) or /7 (IPv6), and agents refuse such networks: list",
        ),
        (
            "/clusters/1/allowedNetworks/0",
            json!("2000::/3"),
            "spec.clusters[1].allowedNetworks: 2000::/3 is wider than /8 (IPv4) or /7 (IPv6)",
        ),
        (
            "/clusters/1/anchoredNetworks",
            json!(["10.0.0.0/8"]),
            "spec.clusters[1].anchoredNetworks: 10.0.0.0/8 lies outside allowedNetworks",
        ),
        (
            "/clusters/1/anchors",
            json!(0),
            "spec.clusters[1].anchors: must be at least 1",
        ),
        (
            "/clusters/1/wireguardPort",
            json!(0),
            "spec.clusters[1].wireguardPort: must be a UDP port",
        ),
        (
            "/clusters/1/endpointNetworks",
            json!(["x"]),
            "spec.clusters[1].endpointNetworks[0]: \"x\" is not a network",
        ),
        (
            "/clusters/1/exports",
            json!([{"namespace": "A"}]),
            "spec.clusters[1].exports[0].namespace: \"A\" is not the name",
        ),
        (
            "/clusters/1/exports",
            json!([{"namespace": "a", "podSelector": {"matchExpressions": [{"key": "k", "operator": "Near"}]}}]),
            "spec.clusters[1].exports[0].podSelector.matchExpressions[0].operator: \"Near\" is not one of",
        ),
        (
            "/clusters/1/exports",
            json!([{"namespace": "a", "podSelector": {"matchExpressions": [{"key": "k", "operator": "In"}]}}]),
            "spec.clusters[1].exports[0].podSelector.matchExpressions[0].values: is empty",
        ),
        (
            "/clusters/1/egress",
            json!([grant("tenant-a", "s")]),
            "spec.clusters[1].egress[0].service.cluster: names this cluster itself",
        ),
        (
            "/clusters/1/egress",
            json!([grant("gone", "s")]),
            "spec.clusters[1].egress[0].service.cluster: \"gone\" is not an entry",
        ),
        (
            "/clusters/1/egress",
            json!([grant("mgmt", "S")]),
            "spec.clusters[1].egress[0].service.name: \"S\" is not a DNS-1123 label",
        ),
        (
            "/clusters/1/egress",
            json!([grant("mgmt", "s"), grant("mgmt", "s")]),
            "spec.clusters[1].egress[1].as: an earlier egress appears as d/s too",
        ),
        (
            "/clusters/1/egress",
            grant_with_port(json!(0)),
            "spec.clusters[1].egress[0].ports[0].port: 0 is not a port",
        ),
        (
            "/clusters/1/egress",
            grant_with_port(json!("a b")),
            "spec.clusters[1].egress[0].ports[0].port: \"a b\" is not the name",
        ),
    ];
    for (path, value, expected) in cases {
        let mut spec = two_clusters();
        match spec.pointer_mut(path) {
            Some(field) => *field = value,
            None => {
                let (parent, key) = path.rsplit_once('/').unwrap();
                spec.pointer_mut(parent).unwrap()[key] = value;
            }
        }
        let problems = to_core(&object(spec)).expect_err(expected);
        let found = problems
            .iter()
            .any(|p| p.to_string().starts_with(&format!("ClusterMesh team/prod: {expected}")));
        assert!(found, "expected {expected:?} among {problems:?}");
    }
}

#[test]
fn mesh_with_one_entry_is_refused() {
    let mut mesh = object(two_clusters());
    mesh.spec.clusters.pop();
    let problems = to_core(&mesh).unwrap_err();
    assert_eq!(
        problems[0].to_string(),
        "ClusterMesh team/prod: spec.clusters: a mesh has at least two entries"
    );
}

#[test]
fn annotation_quarantines_entries_and_unknown_names_warn() {
    let quarantined = |annotation: Option<&str>, field: bool| {
        let mut spec = two_clusters();
        spec["clusters"][1]["quarantine"] = json!(field);
        let mut mesh = object(spec);
        mesh.metadata.annotations = annotation.map(|text| [(QUARANTINE.to_owned(), text.to_owned())].into());
        let (mesh, warnings) = to_core(&mesh).unwrap();
        let entries = mesh.clusters.iter().filter(|cluster| cluster.quarantine);
        let entries: Vec<String> = entries.map(|cluster| cluster.name.clone()).collect();
        (entries, warnings.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    assert_eq!(quarantined(None, true), (named(&["tenant-a"]), vec![]));
    assert_eq!(quarantined(Some(""), false), (vec![], vec![]));
    assert_eq!(quarantined(Some("tenant-a"), false), (named(&["tenant-a"]), vec![]));
    assert_eq!(
        quarantined(Some(" tenant-a , mgmt,"), false),
        (named(&["mgmt", "tenant-a"]), vec![])
    );
    let (entries, warnings) = quarantined(Some("tennant-a,tenant-a"), false);
    assert_eq!(entries, ["tenant-a"]);
    assert_eq!(
        warnings,
        [
            "ClusterMesh team/prod: metadata.annotations[kilo-clustermesh.io/quarantine]: \"tennant-a\" is not an entry of this mesh \
          (entries: mgmt, tenant-a) and quarantines nothing"
        ]
    );
}
