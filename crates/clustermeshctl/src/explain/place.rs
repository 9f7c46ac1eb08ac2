//! How a person writes one end of a connection. Whether there is such a thing is in [`super::locate`].

use std::net::IpAddr;

use clustermesh_core::mesh::{ObjectName, PortRef, Protocol};

/// One end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    Pod { cluster: String, name: ObjectName },
    Service { cluster: String, name: ObjectName },
    Node { cluster: String, name: String },
    Address(IpAddr),
}

/// A port, with its protocol.
pub(super) type Port = (Protocol, PortRef);

const FORMS: &str = "write CLUSTER/NAMESPACE/POD, CLUSTER/NAMESPACE/svc/NAME, CLUSTER/NODE or an address";

/// Reads one end, and the port behind it.
///
/// # Errors
/// What is wrong, and how it is written.
pub(super) fn read(text: &str) -> Result<(Place, Option<Port>), String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok((Place::Address(address.to_canonical()), None));
    }
    let (head, tail) = match text.strip_prefix('[') {
        Some(inner) => {
            let (address, rest) = inner.split_once(']').ok_or("an address in [ needs its ]")?;
            match rest.strip_prefix(':') {
                Some(port) => (address, Some(port)),
                None if rest.is_empty() => (address, None),
                None => return Err(format!("behind ] comes :PORT, not {rest:?}")),
            }
        }
        None => match text.split_once(':') {
            Some((head, tail)) => (head, Some(tail)),
            None => (text, None),
        },
    };
    let port = tail.map(port).transpose()?;
    if let Ok(address) = head.parse::<IpAddr>() {
        return Ok((Place::Address(address.to_canonical()), port));
    }
    let parts: Vec<&str> = head.split('/').collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(FORMS.to_owned());
    }
    let object = |namespace: &str, name: &str| ObjectName {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
    };
    let place = match *parts {
        [cluster, node] => Place::Node {
            cluster: cluster.to_owned(),
            name: node.to_owned(),
        },
        [cluster, namespace, pod] | [cluster, namespace, "pod" | "pods" | "po", pod] => Place::Pod {
            cluster: cluster.to_owned(),
            name: object(namespace, pod),
        },
        [cluster, namespace, "svc" | "service" | "services", service] => Place::Service {
            cluster: cluster.to_owned(),
            name: object(namespace, service),
        },
        _ => return Err(FORMS.to_owned()),
    };
    match (&place, &port) {
        (Place::Pod { .. } | Place::Node { .. } | Place::Address(_), Some((_, PortRef::Name(name)))) => Err(format!(
            "port {name:?} is no number from 1 to 65535; a Service's ports alone have names"
        )),
        _ => Ok((place, port)),
    }
}

fn port(text: &str) -> Result<Port, String> {
    let (port, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = match &*protocol.to_ascii_lowercase() {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "sctp" => Protocol::Sctp,
        _ => return Err(format!("protocol {protocol:?} is none of tcp, udp and sctp")),
    };
    let named = !port.is_empty() && port.bytes().any(|byte| !byte.is_ascii_digit());
    match port.parse::<u16>() {
        Ok(number) if number > 0 => Ok((protocol, PortRef::Number(number))),
        _ if named => Ok((protocol, PortRef::Name(port.to_owned()))),
        _ => Err(format!("port {port:?} is no number from 1 to 65535")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Place {
        Place::Pod {
            cluster: "mgmt".into(),
            name: ObjectName {
                namespace: "ns".into(),
                name: "web-0".into(),
            },
        }
    }

    #[test]
    fn an_end_is_read_as_a_person_writes_it() {
        let tcp = |port| Some((Protocol::Tcp, PortRef::Number(port)));
        let service = Place::Service {
            cluster: "mgmt".into(),
            name: ObjectName {
                namespace: "ns".into(),
                name: "web-0".into(),
            },
        };
        let node = Place::Node {
            cluster: "a".into(),
            name: "w1.example".into(),
        };
        let address = |text: &str| Place::Address(text.parse().unwrap());
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
            assert_eq!(read(text), Ok(want), "{text}");
        }
    }

    #[test]
    fn what_is_no_end_is_refused_with_how_it_is_written() {
        for (text, why) in [
            ("web-0", FORMS),
            ("mgmt//web-0", FORMS),
            ("mgmt/ns/deploy/web", FORMS),
            ("10.1.2.3:0", "port \"0\" is no number from 1 to 65535"),
            ("10.1.2.3:70000", "port \"70000\" is no number from 1 to 65535"),
            ("10.1.2.3:80/icmp", "protocol \"icmp\" is none of tcp, udp and sctp"),
            (
                "mgmt/ns/web-0:http",
                "port \"http\" is no number from 1 to 65535; a Service's ports alone have names",
            ),
            ("[fd00::1", "an address in [ needs its ]"),
        ] {
            assert_eq!(read(text), Err(why.to_owned()), "{text}");
        }
    }
}
