//! The command line of `clustermesh-controller`.

use std::{net::SocketAddr, path::PathBuf};

use clap::Parser;
use clustermesh_core::{hub::HubNamespace, plan::InfrastructurePort};
use clustermesh_daemon::LogFormat;

/// Keeps every member of every ClusterMesh true.
#[derive(Debug, Clone, Parser)]
#[command(name = "clustermesh-controller", version, about, max_term_width = 120)]
pub struct Args {
    /// Kubeconfig of the hub. Default: the ServiceAccount of the pod.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Context of that kubeconfig. Default: its current context.
    #[arg(long, requires = "kubeconfig")]
    pub context: Option<String>,

    /// Namespace whose ClusterMeshes may use this controller's own rights in the hub (`local: true`), with the widest
    /// profile of the other entries there: cluster-meshed (default), sandbox or standard. With `sandbox`, only Services of
    /// that namespace itself may be granted there, and those that carry `kilo-clustermesh.io/allowed-from: NAMESPACE`. May be
    /// given several times; `*` = every namespace. Default: the controller's own namespace (POD_NAMESPACE, else that of the
    /// kubeconfig's context, else `default`).
    #[arg(long = "hub-namespace", value_name = "NAMESPACE[=PROFILE]")]
    pub hub_namespaces: Vec<HubNamespace>,

    /// A port of your infrastructure that is closed to every member on each address of every node, beside the built-in ones
    /// (API server, kubelet, etcd, scheduler, controller-manager, kube-proxy, wg-agent). May be given several times.
    #[arg(long = "infrastructure-port", value_name = "PORT[/PROTOCOL]")]
    pub infrastructure_ports: Vec<InfrastructurePort>,

    /// What tells this hub's objects from another's in a shared member. Default: the UID of the hub's kube-system
    /// namespace.
    #[arg(long, value_name = "ID", value_parser = label_value)]
    pub hub_id: Option<String>,

    /// Address of /metrics, /healthz, /readyz and /debug/state.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8081")]
    pub listen: SocketAddr,

    /// How log lines are written; RUST_LOG chooses which.
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,
}

/// It becomes the value of a label.
fn label_value(text: &str) -> Result<String, String> {
    let plain = |b: u8| b.is_ascii_alphanumeric();
    let bytes = text.as_bytes();
    let fits = (1..=63).contains(&bytes.len())
        && bytes.first().copied().is_some_and(plain)
        && bytes.last().copied().is_some_and(plain)
        && bytes.iter().all(|b| plain(*b) || b"-_.".contains(b));
    if fits {
        Ok(text.to_owned())
    } else {
        Err("must be the value of a label: at most 63 of a-z, A-Z, 0-9, '-', '_', '.', with a letter or digit at both ends".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_port_of_the_infrastructure_that_is_none_is_refused_by_name() {
        let parse = |values: &[&str]| {
            let words = values.iter().flat_map(|value| ["--infrastructure-port", value]);
            Args::try_parse_from(["clustermesh-controller"].into_iter().chain(words))
        };
        let ports = parse(&["8132", "53/UDP"]).unwrap().infrastructure_ports;
        assert_eq!(ports, ["8132/TCP", "53/UDP"].map(|text| text.parse().unwrap()));
        let why = parse(&["konnectivity"]).unwrap_err().to_string();
        assert!(
            why.contains("--infrastructure-port") && why.contains("8132/TCP"),
            "{why}"
        );
    }

    #[test]
    fn a_hub_id_that_no_label_can_hold_is_refused() {
        assert!(label_value("0b9ad1b6-51a3-4a44").is_ok());
        for text in ["", "-a", "a/b", &"x".repeat(64)] {
            assert!(label_value(text).is_err(), "{text:?}");
        }
    }
}
