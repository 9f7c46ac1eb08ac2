//! From what a person or a Secret says to a client of an API server, for the controller and the command line alike. Nothing is
//! watched here, and nothing decided about meshes.
#![forbid(unsafe_code)]

use std::{path::Path, time::Duration};

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};

pub mod kubeconfig;

use kubeconfig::{HubHosts, Refused};

/// Why there is no client for a member.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// The kubeconfig says something that is not done.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The client's own reason is the source: it may repeat parts of what was given.
    #[error("its certificates cannot be used; each must be base64 of PEM")]
    Certificates(#[source] Box<kube::Error>),
}

/// A client with the kubeconfig of a member, which is hostile input. `hub` = where no member may be.
///
/// # Errors
/// Anything in it that would make this process run, read, trust or reach something it should not.
pub async fn member(text: &[u8], context: Option<&str>, hub: &HubHosts) -> Result<Client, Unusable> {
    let config = kubeconfig::read(text, context, hub).await?;
    // A name may stand for an address that is refused when written; whoever serves the name can change it later, so the
    // hub's network policy is the last word.
    if let Some(host) = config
        .cluster_url
        .host()
        .filter(|host| host.parse::<std::net::IpAddr>().is_err())
    {
        let port = config.cluster_url.port_u16().unwrap_or(443);
        let lookup = tokio::time::timeout(Duration::from_secs(5), tokio::net::lookup_host((host, port))).await;
        for address in lookup.ok().and_then(Result::ok).into_iter().flatten() {
            kubeconfig::check_address(address.ip())?;
        }
    }
    Client::try_from(config).map_err(|error| Unusable::Certificates(Box::new(error)))
}

/// The configuration of a kubeconfig of the person's own, who may write into it what he likes. `file` = `None`: as kubectl
/// finds it (`KUBECONFIG`, then `~/.kube/config`). `context` = `None`: the current one.
///
/// # Errors
/// It cannot be read, or has no such context.
pub async fn own(file: Option<&Path>, context: Option<&str>) -> Result<Config, KubeconfigError> {
    let text = file.map_or_else(Kubeconfig::read, Kubeconfig::read_from)?;
    let options = KubeConfigOptions {
        context: context.map(str::to_owned),
        ..KubeConfigOptions::default()
    };
    Config::from_custom_kubeconfig(text, &options).await
}

/// Where the API of the hub is, by every name that this process knows.
#[must_use]
pub fn hub_hosts(config: &Config) -> HubHosts {
    let url = config.cluster_url.host().map(|host| {
        let host = host.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
        (host, config.cluster_url.port_u16().unwrap_or(443))
    });
    let pod = std::env::var("KUBERNETES_SERVICE_HOST").ok().map(|host| {
        let port = std::env::var("KUBERNETES_SERVICE_PORT")
            .ok()
            .and_then(|port| port.parse().ok());
        (host, port.unwrap_or(443))
    });
    url.into_iter().chain(pod).collect()
}
