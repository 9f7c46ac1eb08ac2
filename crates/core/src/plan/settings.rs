//! Defines the settings of the controller that apply to all meshes, and parses their command-line flag.

use std::{collections::BTreeSet, str::FromStr};

use crate::mesh::Protocol;

/// TCP ports that other members cannot reach on node addresses: kube-apiserver, etcd client and peer, kubelet and its
/// read-only port, scheduler, controller-manager, kube-proxy's metrics and health, wg-agent's admin port. Gateways serve no
/// endpoint with such a port number, at any address.
pub const INFRASTRUCTURE_PORTS: [u16; 10] = [6443, 2379, 2380, 10250, 10255, 10259, 10257, 10249, 10256, 9587];

/// Settings that apply to all meshes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Ports that other members cannot reach on the addresses of nodes: API server, kubelet, etcd and the like.
    pub infrastructure_ports: BTreeSet<(Protocol, u16)>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            infrastructure_ports: INFRASTRUCTURE_PORTS.map(|port| (Protocol::Tcp, port)).into(),
        }
    }
}

impl Settings {
    /// How many infrastructure ports the PeerPolicy CRD allows.
    const MAX_PORTS: usize = 64;

    /// The default settings, with these ports added to the infrastructure ports. The default ports cannot be removed.
    ///
    /// # Errors
    /// There are more ports than a PeerPolicy can hold.
    pub fn with_infrastructure_ports(ports: &[InfrastructurePort]) -> Result<Self, SettingsError> {
        let Self {
            mut infrastructure_ports,
        } = Self::default();
        infrastructure_ports.extend(ports.iter().map(|port| (port.protocol, port.port)));
        match infrastructure_ports.len() {
            ..=Self::MAX_PORTS => Ok(Self { infrastructure_ports }),
            count => Err(SettingsError::TooManyPorts {
                count,
                limit: Self::MAX_PORTS,
            }),
        }
    }
}

/// One `--infrastructure-port PORT[/PROTOCOL]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InfrastructurePort {
    /// Its protocol; TCP if the flag names none.
    pub protocol: Protocol,
    /// From 1 to 65535.
    pub port: u16,
}

/// Why a setting is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// The text is not a port with an optional protocol.
    #[error(
        "{0:?}: write PORT or PORT/PROTOCOL, such as 8132/TCP: a number from 1 to 65535, and TCP (default), UDP or SCTP"
    )]
    MalformedPort(String),
    /// There are more ports than a PeerPolicy can hold.
    #[error("--infrastructure-port: {count} ports with the built-in ones, and a PeerPolicy holds {limit}: name fewer")]
    TooManyPorts {
        /// How many ports there are.
        count: usize,
        /// How many a PeerPolicy can hold.
        limit: usize,
    },
}

impl FromStr for InfrastructurePort {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = || SettingsError::MalformedPort(text.to_owned());
        let (number, protocol) = text.split_once('/').unwrap_or((text, "TCP"));
        let protocols = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
        let protocol = protocols
            .into_iter()
            .find(|known| known.as_str().eq_ignore_ascii_case(protocol))
            .ok_or_else(refused)?;
        let port = number.parse().ok().filter(|port| *port > 0);
        // `parse` also accepts a leading `+`.
        let port = port.filter(|_| !number.starts_with('+')).ok_or_else(refused)?;
        Ok(Self { protocol, port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn port(protocol: Protocol, port: u16) -> InfrastructurePort {
        InfrastructurePort { protocol, port }
    }

    #[test]
    fn infrastructure_port_is_parsed_or_refused_with_an_example() {
        let parsed = ["8132", "8132/TCP", "53/udp", "65535/SCTP"].map(str::parse::<InfrastructurePort>);
        let want = [
            port(Protocol::Tcp, 8132),
            port(Protocol::Tcp, 8132),
            port(Protocol::Udp, 53),
            port(Protocol::Sctp, 65535),
        ];
        assert_eq!(parsed, want.map(Ok));
        for text in [
            "",
            "0",
            "65536",
            "-1",
            "+1",
            "https",
            "8132/",
            "8132/ICMP",
            "8132/TCP/UDP",
            "TCP/8132",
            " 1",
        ] {
            let why = text.parse::<InfrastructurePort>().expect_err(text).to_string();
            assert!(
                why.starts_with(&format!("{text:?}: ")) && why.contains("8132/TCP"),
                "{why}"
            );
        }
    }

    #[test]
    fn extra_ports_are_added_up_to_the_limit_of_the_crd() {
        let built_in = Settings::default().infrastructure_ports;
        assert_eq!(Settings::with_infrastructure_ports(&[]), Ok(Settings::default()));
        let settings = Settings::with_infrastructure_ports(&[
            port(Protocol::Tcp, 8132),
            port(Protocol::Tcp, 10250),
            port(Protocol::Udp, 53),
        ]);
        let mut want = built_in.clone();
        want.extend([(Protocol::Tcp, 8132), (Protocol::Udp, 53)]);
        assert_eq!(
            settings,
            Ok(Settings {
                infrastructure_ports: want
            })
        );

        let room = u16::try_from(Settings::MAX_PORTS - built_in.len()).unwrap();
        let more = |count: u16| {
            Settings::with_infrastructure_ports(&(1..=count).map(|n| port(Protocol::Tcp, n)).collect::<Vec<_>>())
        };
        assert!(more(room).is_ok());
        assert_eq!(
            more(room + 1),
            Err(SettingsError::TooManyPorts { count: 65, limit: 64 })
        );
    }
}
