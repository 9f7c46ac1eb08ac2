use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;

fn ours() -> Owner {
    Owner {
        mesh: Some("prod".into()),
        mesh_namespace: Some("team".into()),
        hub: Some("hub-1".into()),
        source_cluster: Some("mgmt".into()),
    }
}

fn port(name: &str, port: u16, protocol: Protocol) -> ServicePort {
    ServicePort {
        name: name.into(),
        port,
        protocol,
    }
}

const V4: Families = Families { v4: true, v6: false };

#[test]
fn service_is_converted() {
    let read = |value: Value| to_core(&serde_json::from_value(value).unwrap());
    assert_eq!(
        read(json!({"spec": {"selector": {"app": "db"}, "ports": [
            {"name": "pg", "port": 5432}, {"port": 53, "protocol": "UDP"}, {"port": 9, "protocol": "DCCP"}]}})),
        observe::Service {
            managed: None,
            external_name: false,
            selectorless: false,
            ports: vec![port("pg", 5432, Protocol::Tcp), port("", 53, Protocol::Udp)],
            families: V4,
            allowed_from: BTreeSet::new(),
        }
    );
    assert_eq!(
        read(json!({"spec": {"type": "ExternalName", "externalName": "x"}})),
        observe::Service {
            external_name: true,
            selectorless: true,
            families: V4,
            ..observe::Service::default()
        }
    );
}

#[test]
fn slice_is_converted_with_the_defaults_of_kubernetes() {
    let read = |value: Value| slice_to_core(&serde_json::from_value(value).unwrap());
    let labels = json!({"kubernetes.io/service-name": "db"});
    let endpoint = |address: &str, node: Option<&str>, (ready, serving, terminating)| SliceEndpoint {
        address: address.parse().unwrap(),
        node: node.map(str::to_owned),
        ready,
        serving,
        terminating,
    };
    assert_eq!(
        read(json!({"metadata": {"labels": labels}, "addressType": "IPv4",
        "ports": [{"name": "pg", "port": 5432}, {"name": "all"}],
        "endpoints": [
            {"addresses": ["10.0.0.1", "10.0.0.2"], "nodeName": ""},
            {"addresses": ["10.0.0.3"], "nodeName": "worker", "conditions": {"ready": false}},
            {"addresses": ["10.0.0.4"], "conditions": {"ready": false, "serving": true, "terminating": true}},
            {"addresses": ["fd00::1"]}, {"addresses": []}, {"addresses": ["x"]},
        ]})),
        Some(Slice {
            managed: None,
            service: "db".into(),
            v6: false,
            ports: vec![port("pg", 5432, Protocol::Tcp)],
            endpoints: vec![
                endpoint("10.0.0.1", None, (true, true, false)),
                endpoint("10.0.0.3", Some("worker"), (false, false, false)),
                endpoint("10.0.0.4", None, (false, true, true)),
            ],
        })
    );
    assert_eq!(
        read(json!({"metadata": {"labels": labels}, "addressType": "FQDN", "endpoints": []})),
        None
    );
    assert_eq!(
        read(json!({"metadata": {}, "addressType": "IPv4", "endpoints": []})),
        None
    );
}

#[test]
fn api_endpoints_come_only_from_the_kubernetes_service() {
    let slice = |namespace: &str, service: &str, address: &str| -> EndpointSlice {
        serde_json::from_value(json!({
            "metadata": {"namespace": namespace, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4", "ports": [{"name": "https", "port": 6443}], "endpoints": [{"addresses": [address]}]}))
        .unwrap()
    };
    let slices = [
        slice("default", "kubernetes", "192.0.2.1"),
        slice("default", "other", "192.0.2.2"),
        slice("evil", "kubernetes", "192.0.2.3"),
    ];
    assert_eq!(
        api_endpoints(&slices),
        BTreeSet::from(["192.0.2.1:6443".parse().unwrap()])
    );
}

#[test]
fn ended_or_host_network_pod_has_no_addresses() {
    let read = |spec: Value, status: Value| {
        pod_to_core(
            &serde_json::from_value(json!({"metadata": {"labels": {"a": "b"}}, "spec": spec, "status": status}))
                .unwrap(),
        )
    };
    let labels = BTreeMap::from([("a".to_owned(), "b".to_owned())]);
    let on = |addresses: &[&str]| observe::Pod {
        labels: labels.clone(),
        node: "n1".into(),
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
    };
    let running = json!({"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]});
    let spec = |host: bool| json!({"nodeName": "n1", "hostNetwork": host, "containers": []});
    assert_eq!(read(spec(false), running.clone()), on(&["10.0.0.1", "fd00::1"]));
    assert_eq!(read(spec(false), json!({"podIP": "10.0.0.1"})), on(&["10.0.0.1"]));
    assert_eq!(read(spec(true), running), on(&[]));
    assert_eq!(
        read(spec(false), json!({"phase": "Failed", "podIP": "10.0.0.1"})),
        on(&[])
    );
}

#[test]
fn mirrored_service_and_slice_are_written_and_read_back() {
    let planned = PlannedSlice {
        v6: true,
        ports: vec![port("", 5432, Protocol::Tcp)],
        endpoints: vec![SliceEndpoint {
            address: "fd00::1".parse().unwrap(),
            node: None,
            ready: true,
            serving: true,
            terminating: false,
        }],
    };
    let mut slice = EndpointSlice::default();
    update_slice(&mut slice, "postgres", &planned, &ours());
    assert_eq!(
        serde_json::to_value(&slice).unwrap(),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv6",
            "metadata": {"labels": {
                "kilo-clustermesh.io/mesh": "prod", "kilo-clustermesh.io/mesh-namespace": "team",
                "kilo-clustermesh.io/hub": "hub-1", "kilo-clustermesh.io/source-cluster": "mgmt",
                "app.kubernetes.io/managed-by": "kilo-clustermesh.io",
                "endpointslice.kubernetes.io/managed-by": "kilo-clustermesh.io",
                "kubernetes.io/service-name": "postgres",
            }},
            "ports": [{"name": "", "port": 5432, "protocol": "TCP"}],
            "endpoints": [{"addresses": ["fd00::1"], "conditions": {"ready": true, "serving": true, "terminating": false}}],
        })
    );
    assert_eq!(
        slice_to_core(&slice),
        Some(Slice {
            managed: Some(ours()),
            service: "postgres".into(),
            v6: true,
            ports: planned.ports.clone(),
            endpoints: planned.endpoints.clone(),
        })
    );

    let mut service = Service {
        spec: Some(ServiceSpec {
            selector: Some([("app".to_owned(), "x".to_owned())].into()),
            cluster_ip: Some("10.96.0.9".into()),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    };
    let mirror = Mirror {
        ports: planned.ports.clone(),
        families: Families::BOTH,
    };
    update(&mut service, &mirror, &ours());
    assert_eq!(
        to_core(&service),
        observe::Service {
            managed: Some(ours()),
            external_name: false,
            selectorless: true,
            ports: planned.ports,
            families: Families::BOTH,
            allowed_from: BTreeSet::new(),
        }
    );
    assert_eq!(
        service.spec.unwrap().cluster_ip.as_deref(),
        Some("10.96.0.9"),
        "the address that the API server assigned stays"
    );
}

#[test]
fn mirror_becomes_dual_stack_only_for_a_missing_family() {
    const V6: Families = Families { v4: false, v6: true };
    let after = |existing: Value, families: Families| {
        let mut service: Service = serde_json::from_value(existing).unwrap();
        let ports = vec![port("pg", 5432, Protocol::Tcp)];
        update(&mut service, &Mirror { ports, families }, &ours());
        let policy = service.spec.as_ref().unwrap().ip_family_policy.clone();
        (policy, to_core(&service).families.cover(families))
    };
    let dual_stack = (Some("PreferDualStack".to_owned()), true);
    assert_eq!(after(json!({}), Families::default()), (None, true));
    assert_eq!(after(json!({}), V4), (None, true));
    assert_eq!(after(json!({}), V6), dual_stack);
    assert_eq!(after(json!({}), Families::BOTH), dual_stack);
    let service_with = |family: &str, policy: &str| json!({"spec": {"ipFamilies": [family], "ipFamilyPolicy": policy}});
    assert_eq!(after(service_with("IPv6", "SingleStack"), V4), dual_stack);
    assert_eq!(
        after(service_with("IPv6", "SingleStack"), V6),
        (Some("SingleStack".to_owned()), true)
    );
    // A mirror with `PreferDualStack` counts as dual-stack even without an IPv6 address: the cluster has no IPv6 then, and writing the
    // policy again would change nothing.
    assert_eq!(after(service_with("IPv4", "PreferDualStack"), V6), dual_stack);
    assert_eq!(
        after(service_with("IPv4", "RequireDualStack"), V6),
        (Some("RequireDualStack".to_owned()), true)
    );
}

#[test]
fn allowed_from_accepts_only_valid_names() {
    let read = |text: &str| {
        let mut service = Service::default();
        service
            .annotations_mut()
            .insert(ALLOWED_FROM.to_owned(), text.to_owned());
        to_core(&service).allowed_from.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(read("lab"), ["lab"]);
    assert_eq!(read(" team-b ,lab,"), ["lab", "team-b"]);
    assert_eq!(read("*, Lab, a/b,"), [""; 0]);
    assert_eq!(to_core(&Service::default()).allowed_from, BTreeSet::new());
}
