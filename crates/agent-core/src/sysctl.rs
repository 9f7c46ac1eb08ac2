//! The kernel settings (sysctls) that the data path needs, each with its reason. `wg-agent` reads and writes them.

use std::{collections::BTreeSet, fmt};

use crate::{interface::InterfaceName, prefixes::Family, routes::Routes};

/// The desired value of one setting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sysctl {
    /// Its name.
    pub name: Name,
    /// The value to write.
    pub value: u8,
    /// Values that the agent leaves as they are; `value` is one of them.
    pub accept: BTreeSet<u8>,
    /// Whether the running agent may write the setting. Forwarding is left to the administrator of the host, because it changes how the
    /// host handles redirects and router advertisements. `wg-agent prepare` enables IPv4 forwarding.
    pub write: bool,
    /// Why the data path needs the setting, for error messages.
    pub why: &'static str,
}

/// The name of a setting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    /// A setting of the network namespace: the path under `/proc/sys/net`.
    Global(&'static str),
    /// An IPv4 setting of one interface: `ipv4/conf/<interface>/<name>`. For the settings that [`desired`] returns, the kernel uses the
    /// greater of this value and that of `all`.
    Interface(InterfaceName, &'static str),
}

impl fmt::Display for Name {
    /// The syntax of sysctl(8). If the interface name contains dots, the separators are slashes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Global(path) => write!(f, "net.{}", path.replace('/', ".")),
            Self::Interface(interface, name) if interface.as_str().contains('.') => {
                write!(f, "net/ipv4/conf/{interface}/{name}")
            }
            Self::Interface(interface, name) => write!(f, "net.ipv4.conf.{interface}.{name}"),
        }
    }
}

/// Computes the settings for `routes`, the device, and the interface by which its outer packets leave.
#[must_use]
pub fn desired(device: &InterfaceName, underlay: &InterfaceName, routes: &Routes) -> Vec<Sysctl> {
    let on = |name, why| Sysctl {
        name,
        value: 1,
        accept: [1].into(),
        write: true,
        why,
    };
    let forwards = |path| Sysctl {
        write: false,
        ..on(
            Name::Global(path),
            "pods reach the tunnel only through a node that forwards",
        )
    };
    let mut out = vec![
        forwards("ipv4/ip_forward"),
        on(
            Name::Global("ipv4/tcp_fwmark_accept"),
            "replies to a connection from a mesh source that came by the underlay must leave by the underlay",
        ),
        on(
            Name::Global("ipv4/fwmark_reflect"),
            "resets and ICMP errors must leave by the path by which their packet came",
        ),
        Sysctl {
            name: Name::Interface(device.clone(), "rp_filter"),
            value: 2,
            accept: [0, 2].into(),
            write: true,
            why: "packets from the tunnel may have a source that is routed elsewhere, such as one with a throw route",
        },
        on(
            Name::Interface(device.clone(), "ignore_routes_with_linkdown"),
            "without an agent a userspace tunnel has no carrier; senders must then get an ICMP error, not a timeout",
        ),
        on(
            Name::Interface(underlay.clone(), "src_valid_mark"),
            "a strict reverse path filter must look up a mesh source with the mark that its reply has",
        ),
    ];
    if routes.rules.iter().any(|rule| rule.family == Family::V6) {
        out.push(forwards("ipv6/conf/all/forwarding"));
        out.push(on(
            Name::Global("ipv6/fwmark_reflect"),
            "resets and ICMP errors must leave by the path by which their packet came",
        ));
        // Netlink can write this setting of one interface for IPv4, but not for IPv6, and the agent's container has a read-only
        // `/proc/sys`. So this is the default for new interfaces, which the device inherits, and `wg-agent prepare` writes it.
        out.push(on(
            Name::Global("ipv6/conf/default/ignore_routes_with_linkdown"),
            "without an agent a userspace tunnel has no carrier; senders must then get an ICMP error, not a timeout",
        ));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mesh_without_ipv6_needs_no_ipv6_settings() {
        let names: Vec<String> = desired(
            &"kilo0".parse().unwrap(),
            &"eth0.7".parse().unwrap(),
            &Routes::default(),
        )
        .iter()
        .map(|s| s.name.to_string())
        .collect();
        assert_eq!(
            names,
            [
                "net.ipv4.ip_forward",
                "net.ipv4.tcp_fwmark_accept",
                "net.ipv4.fwmark_reflect",
                "net.ipv4.conf.kilo0.rp_filter",
                "net.ipv4.conf.kilo0.ignore_routes_with_linkdown",
                "net/ipv4/conf/eth0.7/src_valid_mark",
            ]
        );
    }
}
