//! Values for the tests of this module.

use std::net::SocketAddr;

use super::*;

mod base_table;
mod compile;
mod endpoints;
mod properties;
mod update;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn nets(texts: &[&str]) -> BTreeSet<IpNet> {
    texts.iter().map(|text| net(text)).collect()
}

fn sockets<T: FromIterator<SocketAddr>>(texts: &[&str]) -> T {
    texts.iter().map(|text| text.parse::<SocketAddr>().unwrap()).collect()
}

fn key(number: u8) -> PublicKey {
    PublicKey::new([number; 32])
}

fn settings() -> Settings {
    Settings {
        interface: "clustermesh0".parse().unwrap(),
        listen_port: 51820,
        admin_port: 9587,
        addresses: [ip("100.66.255.1"), ip("fd66::1")].into(),
        endpoint_networks: nets(&["10.244.0.0/16", "fd10:244::/56"]),
        // The addresses of all gateways, this pod and the API server.
        reserved: nets(&["100.66.255.0/28", "fd66::/64", "10.244.0.9/32", "172.30.0.1/32"]),
        serves: BTreeSet::new(),
        new_connections: 1000,
        sandbox_connections: 16_000,
        endpoint_connections: 4000,
    }
}

fn node(number: u8, addresses: &[&str]) -> Node {
    Node {
        public_key: Ok(key(number)),
        addresses: addresses.iter().map(|text| Ok(ip(text))).collect(),
    }
}

fn team(name: &str) -> ObjectName {
    ObjectName {
        namespace: "team".to_owned(),
        name: name.to_owned(),
    }
}

/// A grant of the TCP port `sql` of the Service team/`service`.
fn sql(service: &str, gateway_port: u16) -> GrantSpec {
    GrantSpec {
        service: team(service),
        port: "sql".to_owned(),
        protocol: Protocol::Tcp,
        gateway_port,
    }
}

/// A ready endpoint of the TCP port `sql`.
fn endpoint(address: &str) -> Endpoint {
    Endpoint {
        protocol: Protocol::Tcp,
        port_name: "sql".to_owned(),
        address: ip(address),
        port: 5432,
        ready: true,
        serving: true,
    }
}

/// A Service with a selector, the TCP port `sql` and these endpoints.
fn observed_service(endpoints: impl IntoIterator<Item = Endpoint>) -> ObservedService {
    ObservedService {
        has_selector: true,
        ports: [(Protocol::Tcp, "sql".to_owned())].into(),
        endpoints: endpoints.into_iter().collect(),
        ..ObservedService::default()
    }
}

/// The SandboxAccess of a sandbox `name` with a network of each family, one node and the grant of team/db.
fn sandbox(name: &str, number: u8) -> Access {
    Access {
        name: name.to_owned(),
        created: i64::from(number),
        identity: name.to_owned(),
        sandbox: name.to_owned(),
        networks: vec![
            Ok(net(&format!("100.80.{number}.0/24"))),
            Ok(net(&format!("fd80:{number}::/64"))),
        ],
        nodes: vec![node(
            number,
            &[&format!("100.80.{number}.1"), &format!("fd80:{number}::1")],
        )],
        grants: vec![sql("db", 20001)],
        new_connections: None,
    }
}

/// The sandboxes `a` and `b`, of which `a` is older, and the Services team/db and team/web.
fn inputs() -> Inputs {
    let db = observed_service([endpoint("10.244.1.5"), endpoint("fd10:244::5")]);
    Inputs {
        settings: settings(),
        accesses: vec![sandbox("a", 1), sandbox("b", 2)],
        services: [
            (team("db"), Service::Observed(db)),
            (
                team("web"),
                Service::Observed(observed_service([endpoint("10.244.1.6")])),
            ),
        ]
        .into(),
    }
}

/// `inputs()` with a change.
fn with(change: impl FnOnce(&mut Inputs)) -> Inputs {
    let mut inputs = inputs();
    change(&mut inputs);
    inputs
}

fn messages(compiled: &Compiled) -> Vec<String> {
    compiled.refused.iter().map(ToString::to_string).collect()
}

/// Asserts that compiling `inputs` refuses exactly these parts, and that the rest of the result is that of `accepted`: the inputs without
/// the refused parts.
#[track_caller]
fn assert_refused(inputs: &Inputs, accepted: &Inputs, refused: &[&str]) {
    let mut compiled = compile(inputs);
    assert_eq!(messages(&compiled), refused);
    compiled.refused.clear();
    let accepted = compile(accepted);
    assert_eq!(messages(&accepted), [""; 0]);
    assert_eq!(compiled, accepted);
}
