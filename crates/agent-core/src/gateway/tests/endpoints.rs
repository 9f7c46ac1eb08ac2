//! Tests which Services are served, and to which endpoints a grant is resolved.

use super::*;
use crate::gateway::endpoints::resolve;

/// `inputs()` after a change of the Service team/db.
fn with_db(change: impl FnOnce(&mut ObservedService)) -> Inputs {
    with(|inputs| {
        let mut db = observed_service([endpoint("10.244.1.5"), endpoint("fd10:244::5")]);
        change(&mut db);
        inputs.services.insert(team("db"), Service::Observed(db));
    })
}

/// The grant of team/db to `a`.
fn grant_of_db(inputs: &Inputs) -> Grant {
    let table = compile(inputs).table;
    let sandbox = table.sandboxes[&net("100.80.1.0/24")];
    table.grants[&(sandbox, Protocol::Tcp, 20001)].clone()
}

/// Adds the grant to `a`. `service` is the entry of its Service in the inputs; `None` = no entry. Asserts that only this grant is
/// refused, with this message.
#[track_caller]
fn assert_service_refused(granted: GrantSpec, service: Option<Service>, refused: &str) {
    let bad = with(|inputs| {
        inputs
            .services
            .extend(service.map(|service| (granted.service.clone(), service)));
        inputs.accesses[0].grants.push(granted);
    });
    let refused = format!("SandboxAccess a: spec.grants[1].service: {refused}");
    assert_refused(&bad, &inputs(), &[&refused]);
}

#[test]
fn service_that_is_absent_or_has_no_such_port_is_refused() {
    let absent = Some(Service::Absent);
    assert_service_refused(sql("x", 2), absent, "ServiceMissing: there is no Service team/x");
    let mut other = sql("x", 2);
    // The quotation mark must be escaped in the message.
    other.port = "\"log".to_owned();
    let seen = Some(Service::Observed(observed_service([])));
    assert_service_refused(
        other,
        seen.clone(),
        "ServiceMissing: Service team/x has no tcp port \"\\\"log\"",
    );
    let mut other = sql("x", 2);
    other.protocol = Protocol::Udp;
    assert_service_refused(other, seen, "ServiceMissing: Service team/x has no udp port \"sql\"");
}

#[test]
fn service_that_is_not_known_is_refused() {
    let unread = "ServiceUnknown: Service team/x has not been read yet";
    assert_service_refused(sql("x", 2), None, unread);
    let forbidden = Service::Unknown("gateways may not read it".to_owned());
    assert_service_refused(sql("x", 2), Some(forbidden), "ServiceUnknown: gateways may not read it");
}

// threat: gateway-forbidden-endpoint
#[test]
fn service_that_no_sandbox_may_reach_is_refused() {
    let mut server = sql("x", 2);
    (server.service.namespace, server.service.name) = ("default".to_owned(), "kubernetes".to_owned());
    let seen = |change: fn(&mut ObservedService)| {
        let mut observed = observed_service([endpoint("10.244.1.7")]);
        change(&mut observed);
        Some(Service::Observed(observed))
    };
    let refused = "ServiceNotServed: this is the API server, which no sandbox may reach";
    assert_service_refused(server, seen(|_| {}), refused);
    let refused = "ServiceNotServed: Service team/x mirrors a Service of another cluster: grant that Service";
    assert_service_refused(sql("x", 2), seen(|observed| observed.is_mirror = true), refused);
    let refused = "ServiceNotServed: Service team/x is of type ExternalName and has no endpoints";
    assert_service_refused(sql("x", 2), seen(|observed| observed.is_external_name = true), refused);
    let refused = "ServiceNotServed: Service team/x has no selector: its EndpointSlices are written by hand and may hold any \
                   address, so no sandbox may reach it";
    assert_service_refused(sql("x", 2), seen(|observed| observed.has_selector = false), refused);
}

#[test]
fn only_service_default_kubernetes_is_the_api_server() {
    for (namespace, name) in [("team", "kubernetes"), ("default", "db")] {
        let service = ObjectName {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        let inputs = with(|inputs| {
            inputs.accesses[0].grants[0].service = service.clone();
            inputs
                .services
                .insert(service, Service::Observed(observed_service([endpoint("10.244.1.5")])));
        });
        assert_eq!(messages(&compile(&inputs)), [""; 0]);
        assert_eq!(compile(&inputs).table.count_open_grants(), 2);
    }
}

#[test]
fn unnamed_port_of_a_service_is_served() {
    let mut inputs = with_db(|db| {
        db.ports = [(Protocol::Tcp, String::new())].into();
        let unnamed = Endpoint {
            port_name: String::new(),
            ..endpoint("10.244.1.5")
        };
        db.endpoints = [unnamed].into();
    });
    inputs.accesses[0].grants[0].port.clear();
    assert_eq!(
        grant_of_db(&inputs).balancer.v4,
        sockets::<Vec<_>>(&["10.244.1.5:5432"])
    );
}

/// Endpoints that are ready, draining, or neither.
fn conditions(ready: &[&str], draining: &[&str], neither: &[&str]) -> BTreeSet<Endpoint> {
    let with = |texts: &[&str], ready, serving| {
        let each = texts.iter().map(|text| Endpoint {
            ready,
            serving,
            ..endpoint(text)
        });
        each.collect::<Vec<_>>()
    };
    let all = [
        with(ready, true, true),
        with(draining, false, true),
        with(neither, false, false),
    ];
    all.into_iter().flatten().collect()
}

#[test]
fn ready_endpoints_take_connections_and_draining_ones_keep_them() {
    let inputs = with_db(|db| {
        db.endpoints = conditions(
            &["10.244.1.7", "10.244.1.5", "fd10:244::5"],
            &["10.244.1.6", "fd10:244::6"],
            &["10.244.1.8", "fd10:244::8"],
        );
    });
    let grant = grant_of_db(&inputs);
    let want = Balancer {
        v4: sockets(&["10.244.1.5:5432", "10.244.1.7:5432"]),
        v6: sockets(&["[fd10:244::5]:5432"]),
        sticky: false,
    };
    assert_eq!(grant.balancer, want);
    let allowed_endpoints = [
        "10.244.1.5:5432",
        "10.244.1.6:5432",
        "10.244.1.7:5432",
        "[fd10:244::5]:5432",
        "[fd10:244::6]:5432",
    ];
    assert_eq!(grant.allowed_endpoints, sockets(&allowed_endpoints));
}

#[test]
fn draining_endpoint_is_used_if_none_of_its_family_is_ready() {
    let inputs = with_db(|db| db.endpoints = conditions(&["10.244.1.5"], &["10.244.1.6", "fd10:244::6"], &[]));
    let balancer = grant_of_db(&inputs).balancer;
    assert_eq!(balancer.v4, sockets::<Vec<_>>(&["10.244.1.5:5432"]));
    assert_eq!(balancer.v6, sockets::<Vec<_>>(&["[fd10:244::6]:5432"]));
}

#[test]
fn endpoint_with_several_entries_is_ready_if_one_of_them_is() {
    let inputs = with_db(|db| db.endpoints = conditions(&["10.244.1.5"], &["10.244.1.5"], &["10.244.1.5"]));
    let grant = grant_of_db(&inputs);
    assert_eq!(grant.balancer.v4, sockets::<Vec<_>>(&["10.244.1.5:5432"]));
    assert_eq!(grant.allowed_endpoints, sockets(&["10.244.1.5:5432"]));
}

#[test]
fn grant_without_an_endpoint_is_kept_but_not_open() {
    let inputs = with_db(|db| db.endpoints = conditions(&[], &[], &["10.244.1.5"]));
    let compiled = compile(&inputs);
    assert_eq!(messages(&compiled), [""; 0]);
    assert_eq!(
        (compiled.table.grants.len(), compiled.table.count_open_grants()),
        (2, 0)
    );
    let grant = grant_of_db(&inputs);
    assert_eq!(
        (grant.balancer, grant.allowed_endpoints),
        (Balancer::default(), BTreeSet::new())
    );
}

#[test]
fn grant_with_an_endpoint_of_one_family_is_open() {
    for address in ["10.244.1.5", "fd10:244::5"] {
        let inputs = with_db(|db| db.endpoints = [endpoint(address)].into());
        assert_eq!(compile(&inputs).table.count_open_grants(), 2);
    }
}

#[test]
fn ipv4_mapped_endpoint_is_an_ipv4_endpoint() {
    let inputs = with_db(|db| db.endpoints = [endpoint("::ffff:10.244.1.5")].into());
    assert_eq!(
        grant_of_db(&inputs).balancer.v4,
        sockets::<Vec<_>>(&["10.244.1.5:5432"])
    );
}

#[test]
fn endpoints_of_other_ports_and_protocols_are_ignored() {
    let inputs = with_db(|db| {
        let udp = Endpoint {
            protocol: Protocol::Udp,
            ..endpoint("10.244.1.7")
        };
        let log = Endpoint {
            port_name: "log".to_owned(),
            // A forbidden endpoint of another port does not affect this grant.
            ..endpoint("192.0.2.1")
        };
        db.endpoints = [endpoint("10.244.1.5"), udp, log].into();
    });
    assert_eq!(messages(&compile(&inputs)), [""; 0]);
    assert_eq!(grant_of_db(&inputs).allowed_endpoints, sockets(&["10.244.1.5:5432"]));
}

#[test]
fn sticky_service_makes_a_sticky_balancer() {
    assert!(grant_of_db(&with_db(|db| db.is_sticky = true)).balancer.sticky);
}

/// Adds `further` endpoints to team/db, granted only to `a`, and asserts that only these endpoints are left out.
#[track_caller]
fn assert_left_out(inputs: Inputs, further: &[Endpoint], refused: &str) {
    let only_access_of_a = |mut inputs: Inputs| {
        inputs.accesses.truncate(1);
        inputs
    };
    let mut bad = inputs.clone();
    let mut db = observed_service([endpoint("10.244.1.5"), endpoint("fd10:244::5")]);
    db.endpoints.extend(further.iter().cloned());
    bad.services.insert(team("db"), Service::Observed(db));
    let refused = format!("SandboxAccess a: spec.grants[0].service: EndpointForbidden: {refused}");
    assert_refused(&only_access_of_a(bad), &only_access_of_a(inputs), &[&refused]);
}

// threat: gateway-forbidden-endpoint
#[test]
fn endpoint_outside_the_endpoint_networks_is_left_out() {
    for address in ["192.0.2.1", "fd11::1"] {
        let refused = format!("endpoint {address} lies outside the networks of --endpoint-network");
        assert_left_out(inputs(), &[endpoint(address)], &refused);
    }
}

// threat: gateway-forbidden-endpoint
#[test]
fn endpoint_at_a_reserved_address_is_left_out() {
    let mut settings = settings();
    settings.endpoint_networks = nets(&["0.0.0.0/0", "::/0"]);
    // fd66::1 is this gateway's own address. An endpoint with it is left out even if the address is not reserved.
    settings.reserved.remove(&net("fd66::/64"));
    let resolved = |address: &str| {
        let db = observed_service([endpoint("10.244.1.5"), endpoint(address)]);
        resolve(&sql("db", 1), Some(&Service::Observed(db)), &settings).unwrap()
    };
    assert_eq!(resolved("192.0.2.1").left_out, None);
    for address in [
        "10.244.0.9",
        "172.30.0.1",
        "100.66.255.7",
        "fd66::1",
        "127.0.0.1",
        "169.254.169.254",
        "::1",
        "fe80::1",
        "::ffff:127.0.0.1",
    ] {
        let found = resolved(address);
        assert_eq!(found.allowed_endpoints, sockets(&["10.244.1.5:5432"]), "{address}");
        let address = ip(address).to_canonical();
        let message = format!(
            "endpoint {address} belongs to a gateway, this pod, the API server or the local host: closed to every sandbox"
        );
        assert_eq!(found.left_out, Some(message));
    }
}

// threat: gateway-forbidden-endpoint
#[test]
fn endpoint_at_an_infrastructure_port_is_left_out() {
    for port in [2379, 2380, 6443, 9587, 10249, 10250, 10255, 10256, 10257, 10259] {
        let further = Endpoint {
            port,
            ..endpoint("10.244.1.6")
        };
        let refused =
            format!("endpoint 10.244.1.6 port {port}: a port of Kubernetes or wg-agent, closed to every sandbox");
        assert_left_out(inputs(), &[further], &refused);
    }
}

#[test]
fn several_forbidden_endpoints_are_counted() {
    let refused = "2 endpoints are left out: 192.0.2.1 lies outside the networks of --endpoint-network, ...";
    assert_left_out(inputs(), &[endpoint("192.0.2.1"), endpoint("192.0.2.2")], refused);
}
