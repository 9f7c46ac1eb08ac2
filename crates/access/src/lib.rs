//! Makes a Kubernetes client from a kubeconfig, either a member's Secret (hostile input, checked) or the user's own, for the
//! controller and `clustermeshctl`.
//!
//! # Example
//!
//! A kubeconfig that names a program is refused, because the controller would run it:
//!
//! ```
//! use clustermesh_access::{kubeconfig::HubHosts, member, memory::Account};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let kubeconfig = b"
//! current-context: edge
//! contexts: [{name: edge, context: {cluster: edge, user: admin}}]
//! clusters: [{name: edge, cluster: {server: 'https://edge.example:6443', certificate-authority-data: LS0tLS1C}}]
//! users: [{name: admin, user: {exec: {command: aws, apiVersion: client.authentication.k8s.io/v1}}}]
//! ";
//! let refused = member(kubeconfig, None, &HubHosts::default(), &Account::alone(64 << 20)).await;
//! let message = refused.err().unwrap().to_string();
//! assert!(message.starts_with("the kubeconfig has users[].user.exec, which is refused"), "{message}");
//! # }
//! ```
#![forbid(unsafe_code)]

use std::{error::Error, path::Path};

use hyper_timeout::TimeoutConnector;
use hyper_util::{client::legacy, rt::TokioExecutor};
use kube::{
    Client, Config,
    client::ConfigExt,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tower::{BoxError, Layer, ServiceExt};

pub mod bounds;
mod connect;
pub mod kubeconfig;
pub mod memory;

use bounds::BoundLayer;
use connect::Connector;
use kubeconfig::{HubHosts, Refused};
use memory::Account;

/// Bytes that hyper may buffer for one connection.
const CONNECTION: usize = 64 * 1024;

/// Why there is no client for a member.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// A field of the kubeconfig is refused.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The source is kube's error. It may repeat parts of the kubeconfig, so it is not in the message.
    #[error("its certificates cannot be used; each must be base64 of PEM")]
    Certificates(#[source] Box<kube::Error>),
}

/// Makes a client from a member's kubeconfig. The kubeconfig and the member's API server are hostile input. `hub` are the addresses of
/// the hub's API server, at which no member may be. Data that is being read is charged to `account`.
///
/// # Errors
/// A field of the kubeconfig would make this process run, read, trust or reach something it should not. Host names are resolved and
/// checked at each connection, not here. If one is refused, the request fails with [`Refused`] among its causes.
pub async fn member(text: &[u8], context: Option<&str>, hub: &HubHosts, account: &Account) -> Result<Client, Unusable> {
    let config = kubeconfig::read(text, context, hub).await?;
    client(&config, hub, account).map_err(|error| Unusable::Certificates(Box::new(error)))
}

/// kube's own stack without what is not needed (proxies, retries, tracing of requests), over our connector and bounds.
fn client(config: &Config, hub: &HubHosts, account: &Account) -> Result<Client, kube::Error> {
    let port = config.cluster_url.port_u16().unwrap_or(443);
    let tls = config.rustls_https_connector_with_connector(Connector::new(hub.clone(), port))?;
    let mut connector = TimeoutConnector::new(tls);
    connector.set_connect_timeout(config.connect_timeout);
    let http: legacy::Client<_, kube::client::Body> = legacy::Builder::new(TokioExecutor::new())
        .http1_max_buf_size(CONNECTION)
        .build(connector);
    let bounded = BoundLayer::new(account.clone()).layer(http.map_err(BoxError::from));
    let stack = tower::ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(bounded);
    Ok(Client::new(stack, config.default_namespace.clone()))
}

/// The cause of type `E` of an error, however deep.
#[must_use]
pub fn cause<E: Error + Clone + 'static>(error: &(dyn Error + 'static)) -> Option<E> {
    let mut next = Some(error);
    // The limit ends the search in a cyclic chain.
    for _ in 0..16 {
        let error = next?;
        if let Some(found) = error.downcast_ref::<E>() {
            return Some(found.clone());
        }
        // What is inside an `io::Error` is not among its sources, but its own sources are.
        let inside = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        next = inside
            .map(|inside| inside as &(dyn Error + 'static))
            .or_else(|| error.source());
    }
    None
}

/// Reads the user's own kubeconfig, which is trusted. Without `file` it is found as by kubectl (`KUBECONFIG`, then `~/.kube/config`).
/// Without `context` the current one is used.
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

/// The hosts of the hub's API server that this process knows: from its configuration, and from the environment of its pod.
#[must_use]
pub fn hub_hosts(config: &Config) -> HubHosts {
    let url = config
        .cluster_url
        .host()
        .map(|host| (kubeconfig::host_of(host), config.cluster_url.port_u16().unwrap_or(443)));
    let pod = std::env::var("KUBERNETES_SERVICE_HOST").ok().map(|host| {
        let port = std::env::var("KUBERNETES_SERVICE_PORT")
            .ok()
            .and_then(|port| port.parse().ok());
        (host, port.unwrap_or(443))
    });
    HubHosts::new(url.into_iter().chain(pod))
}
