//! Parses one end of a connection, as it is written on the command line. [`super::locate`] finds its addresses.

use std::net::IpAddr;

use clustermesh_core::mesh::{ObjectName, PortRef, Protocol};

/// One end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    Pod { cluster: String, name: ObjectName },
    Service { cluster: String, name: ObjectName },
    Node { cluster: String, name: String },
    Address(IpAddr),
}

pub(super) type Port = (Protocol, PortRef);

const FORMS: &str = "write CLUSTER/NAMESPACE/POD, CLUSTER/NAMESPACE/svc/NAME, CLUSTER/NODE or an address";

/// Parses one end and its port.
///
/// # Errors
/// Describes the error, or lists the valid forms.
pub(super) fn parse(text: &str) -> Result<(ConnectionEnd, Option<Port>), String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok((ConnectionEnd::Address(address.to_canonical()), None));
    }
    let (head, tail) = match text.strip_prefix('[') {
        Some(inner) => {
            let (address, rest) = inner.split_once(']').ok_or("the closing ] of the address is missing")?;
            match rest.strip_prefix(':') {
                Some(port) => (address, Some(port)),
                None if rest.is_empty() => (address, None),
                None => return Err(format!("write :PORT after the ], not {rest:?}")),
            }
        }
        None => match text.split_once(':') {
            Some((head, tail)) => (head, Some(tail)),
            None => (text, None),
        },
    };
    let port = tail.map(parse_port).transpose()?;
    if let Ok(address) = head.parse::<IpAddr>() {
        return Ok((ConnectionEnd::Address(address.to_canonical()), port));
    }
    let parts: Vec<&str> = head.split('/').collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(FORMS.to_owned());
    }
    let object = |namespace: &str, name: &str| ObjectName {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    let end = match *parts {
        [cluster, node] => ConnectionEnd::Node {
            cluster: cluster.to_owned(),
            name: node.to_owned(),
        },
        [cluster, namespace, pod] | [cluster, namespace, "pod" | "pods" | "po", pod] => ConnectionEnd::Pod {
            cluster: cluster.to_owned(),
            name: object(namespace, pod),
        },
        [cluster, namespace, "svc" | "service" | "services", service] => ConnectionEnd::Service {
            cluster: cluster.to_owned(),
            name: object(namespace, service),
        },
        _ => return Err(FORMS.to_owned()),
    };
    match (&end, &port) {
        (
            ConnectionEnd::Pod { .. } | ConnectionEnd::Node { .. } | ConnectionEnd::Address(_),
            Some((_, PortRef::Name(name))),
        ) => Err(format!(
            "port {name:?} is not a number from 1 to 65535; only ports of Services have names"
        )),
        _ => Ok((end, port)),
    }
}

fn parse_port(text: &str) -> Result<Port, String> {
    let (port, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = match &*protocol.to_ascii_lowercase() {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "sctp" => Protocol::Sctp,
        _ => return Err(format!("protocol {protocol:?} is not tcp, udp or sctp")),
    };
    let is_name = !port.is_empty() && port.bytes().any(|byte| !byte.is_ascii_digit());
    match port.parse::<u16>() {
        Ok(number) if number > 0 => Ok((protocol, PortRef::Number(number))),
        _ if is_name => Ok((protocol, PortRef::Name(port.to_owned()))),
        _ => Err(format!("port {port:?} is not a number from 1 to 65535")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> ConnectionEnd {
        ConnectionEnd::Pod {
            cluster: "mgmt".into(),
            name: ObjectName {
                namespace: "ns".into(),
                name: "web-0".into(),
            },
        }
    }

    #[test]
    fn all_forms_of_an_end_are_parsed() {
        let tcp = |port| Some((Protocol::Tcp, PortRef::Number(port)));
        let service = ConnectionEnd::Service {
            cluster: "mgmt".into(),
            name: ObjectName {
                namespace: "ns".into(),
                name: "web-0".into(),
            },
        };
        let node = ConnectionEnd::Node {
            cluster: "a".into(),
            name: "w1.example".into(),
        };
        let address = |text: &str| ConnectionEnd::Address(text.parse().unwrap());
        for (text, want) in [
            ("mgmt/ns/web-0", (pod(), None)),
            ("mgmt/ns/pod/web-0:80", (pod(), tcp(80))),
            ("mgmt/ns/svc/web-0:5432/tcp", (service.clone(), tcp(5432))),
            (
                "mgmt/ns/service/web-0:sql",
                (service, Some((Protocol::Tcp, PortRef::Name("sql".into())))),
            ),
            (
                "a/w1.example:53/UDP",
                (node, Some((Protocol::Udp, PortRef::Number(53)))),
            ),
            ("10.1.2.3", (address("10.1.2.3"), None)),
            ("10.1.2.3:443", (address("10.1.2.3"), tcp(443))),
            ("fd00::1", (address("fd00::1"), None)),
            ("[fd00::1]:443", (address("fd00::1"), tcp(443))),
            ("::ffff:10.1.2.3", (address("10.1.2.3"), None)),
        ] {
            assert_eq!(parse(text), Ok(want), "{text}");
        }
    }

    #[test]
    fn invalid_end_is_refused_with_a_reason() {
        for (text, why) in [
            ("web-0", FORMS),
            ("mgmt//web-0", FORMS),
            ("mgmt/ns/deploy/web", FORMS),
            ("10.1.2.3:0", "port \"0\" is not a number from 1 to 65535"),
            ("10.1.2.3:70000", "port \"70000\" is not a number from 1 to 65535"),
            ("10.1.2.3:80/icmp", "protocol \"icmp\" is not tcp, udp or sctp"),
            (
                "mgmt/ns/web-0:http",
                "port \"http\" is not a number from 1 to 65535; only ports of Services have names",
            ),
            ("[fd00::1", "the closing ] of the address is missing"),
        ] {
            assert_eq!(parse(text), Err(why.to_owned()), "{text}");
        }
    }
}
