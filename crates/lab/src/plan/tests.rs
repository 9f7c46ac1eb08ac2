//! Checks the ranges, addresses and names of plans.

use std::net::IpAddr;

use super::*;

#[test]
fn second_cluster_of_a_plan_has_the_second_default_ranges() {
    let plan = LabPlan::clusters(&[("mgmt", 2), ("tenant-a", 1)]);
    let tenant = &plan.clusters[1];
    assert_eq!(
        *tenant,
        ClusterPlan {
            name: "tenant-a".into(),
            nodes: 1,
            controllers: true,
            pod_cidr: "10.20.0.0/16".parse().unwrap(),
            service_cidr: "10.21.0.0/16".parse().unwrap(),
            wireguard_cidr: "100.66.2.0/24".parse().unwrap(),
            underlay: "172.30.2.0/24".parse().unwrap(),
            node_network: NodeNetwork::Underlay,
            first_underlay_node: None,
            v6: None,
            proxy: ProxyMode::Nftables,
            policies: false,
            pod_network: PodNetwork::HostGateway,
            api_node: None,
        }
    );
    assert_eq!(tenant.api_address(), IpAddr::from([172, 30, 2, 1]));
    assert_eq!(tenant.api_service_ip(), IpAddr::from([10, 21, 0, 1]));
    assert_eq!(tenant.dns_ip(), IpAddr::from([10, 21, 0, 10]));
    assert_eq!(
        tenant.node(1),
        NodePlan {
            name: "tenant-a-1".into(),
            cluster: "tenant-a".into(),
            address: IpAddr::from([172, 30, 2, 11]),
            uplink: Uplink::Underlay,
            address_v6: None,
        }
    );
    plan.validate().unwrap();
}

#[test]
fn dual_stack_plan_adds_ipv6_range_to_each_ipv4_range() {
    let plan = LabPlan::clusters(&[("mgmt", 2), ("tenant-a", 1)]).dual_stack();
    let tenant = &plan.clusters[1];
    assert_eq!(
        tenant.v6,
        Some(PlanV6 {
            pod_cidr: "fd00:10:20::/48".parse().unwrap(),
            service_cidr: "fd00:10:21::/112".parse().unwrap(),
            underlay: "fd00:172:30:2::/64".parse().unwrap(),
            is_only_family: false,
        })
    );
    assert_eq!(tenant.node(1).address_v6, Some("fd00:172:30:2::b".parse().unwrap()));
    assert_eq!(tenant.default_gateway_v6(), Some("fd00:172:30:2::1".parse().unwrap()));
    plan.validate().unwrap();
}

#[test]
fn ipv6_only_cluster_has_no_ipv4_address() {
    let plan = LabPlan::clusters(&[("mgmt", 2), ("tenant-a", 1)]).dual_stack();
    let plan = plan.ipv6_only("tenant-a");
    let tenant = &plan.clusters[1];
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    assert_eq!(
        (tenant.api_address(), tenant.api_service_ip(), tenant.dns_ip()),
        (ip("fd00:172:30:2::1"), ip("fd00:10:21::1"), ip("fd00:10:21::a"))
    );
    assert_eq!(tenant.node(1).addresses(), [ip("fd00:172:30:2::b")]);
    let net = |text: &str| text.parse::<IpNet>().unwrap();
    assert_eq!(
        (tenant.pod_cidrs(), tenant.service_cidrs(), tenant.wireguard_cidr),
        (
            vec![net("fd00:10:20::/48")],
            vec![net("fd00:10:21::/112")],
            net("fd00:66:2::/112")
        )
    );
    assert_eq!(tenant.load_balancer_ips(), [ip("fd00:172:30:2::f0")]);
    plan.validate().unwrap();
    let in_pods = plan.with_workers_in_pods("tenant-a", "mgmt", &[1]);
    assert_eq!(
        in_pods.validate().unwrap_err().to_string(),
        "tenant-a: nodes in pods or behind a NAT have IPv4"
    );
}

#[test]
fn clusters_with_equal_pod_and_service_ranges_are_valid() {
    let plan = LabPlan::clusters(&[("mgmt", 1), ("a", 1), ("b", 1)]).dual_stack();
    let equal = plan.clone().with_ranges_of("b", "a");
    let [a, b, before] = [&equal.clusters[1], &equal.clusters[2], &plan.clusters[2]];
    let ranges = |one: &ClusterPlan| {
        let v6 = one.v6.clone().unwrap();
        (one.pod_cidr, one.service_cidr, v6.pod_cidr, v6.service_cidr)
    };
    assert_eq!(ranges(b), ranges(a));
    assert_eq!(
        (b.wireguard_cidr, b.node(1)),
        (before.wireguard_cidr, before.node(1)),
        "the other ranges are unchanged"
    );
    equal.validate().unwrap();
}

#[test]
fn worker_in_pod_has_pod_address_and_api_cluster_ip() {
    let plan = LabPlan::clusters(&[("mgmt", 2), ("kv", 1)]).with_workers_in_pods("kv", "mgmt", &[2, 1]);
    let (mgmt, kv) = (&plan.clusters[0], &plan.clusters[1]);
    let api = Ipv4Addr::new(10, 11, 0, 101);
    let node_network = NodeNetwork::Pods {
        of: "mgmt".into(),
        nodes: vec![2, 1],
        range: "10.10.201.0/24".parse().unwrap(),
        api,
    };
    assert_eq!(kv.node_network, node_network);
    assert_eq!(kv.pod_network, PodNetwork::Vxlan);
    assert_eq!(
        (kv.advertised_api(), kv.api_address()),
        (IpAddr::from(api), IpAddr::from([172, 30, 2, 1]))
    );
    assert_eq!(mgmt.advertised_api(), mgmt.api_address());
    let range = "10.10.201.0/24".parse().unwrap();
    let host = HostNode {
        name: "mgmt-1".into(),
        address: IpAddr::from([172, 30, 1, 11]),
    };
    let want = NodePlan {
        name: "kv-1".into(),
        cluster: "kv".into(),
        address: IpAddr::from([10, 10, 201, 11]),
        uplink: Uplink::Pods { of: host, range },
        address_v6: None,
    };
    assert_eq!(kv.node_in_pods(1, &mgmt.node(1), range), want);
    plan.validate().unwrap();
}

#[test]
fn workers_in_pods_of_missing_node_are_refused() {
    let plan = LabPlan::clusters(&[("mgmt", 1), ("kv", 1)]).with_workers_in_pods("kv", "mgmt", &[1, 2]);
    assert_eq!(
        plan.validate().unwrap_err().to_string(),
        "kv: its nodes cannot be pods on the nodes [1, 2] of mgmt: there is no such node on the underlay, or one of the two \
         clusters has only an API server"
    );
}

#[test]
fn flannel_with_ipv6_or_nodes_in_pods_is_refused() {
    let plan = LabPlan::clusters(&[("mgmt", 1), ("kv", 1)]);
    let refusal = |plan: LabPlan| plan.validate().unwrap_err().to_string();
    plan.clone().with_flannel("mgmt").validate().unwrap();
    assert_eq!(
        refusal(plan.clone().dual_stack().with_flannel("mgmt")),
        "mgmt: the lab's VXLANs carry IPv4 only"
    );
    for cluster in ["mgmt", "kv"] {
        let in_pods = plan.clone().with_workers_in_pods("kv", "mgmt", &[1]);
        assert_eq!(
            refusal(in_pods.with_flannel(cluster)),
            format!("{cluster}: nodes in pods need the lab's own pod network")
        );
    }
}

#[test]
fn api_server_is_advertised_at_a_node_of_the_underlay_only() {
    let nat = NatKind::EndpointDependent;
    let plan = LabPlan::clusters(&[("mgmt", 1), ("dc", 2)]).with_nat_for(1, "dc", "192.168.1.0/24", nat);
    let on = |n| plan.clone().with_api_on_node("dc", n);
    on(2).validate().unwrap();
    let dc = &on(2).clusters[1];
    assert_eq!(dc.advertised_api(), IpAddr::from([172, 30, 2, 12]));
    assert_eq!(dc.api_for_nodes(), dc.api_address());
    // Node 1 is behind the NAT, and there is no node 3.
    for n in [1, 3] {
        assert_eq!(
            on(n).validate().unwrap_err().to_string(),
            format!("dc: its API server cannot have the address of node {n}, which is not on the underlay")
        );
    }
}

#[test]
fn duplicate_cluster_name_is_refused() {
    let error = LabPlan::control_planes(&["a", "a"]).validate().unwrap_err();
    assert_eq!(error.to_string(), "cluster name \"a\" is taken");
}
