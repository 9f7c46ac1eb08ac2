//! Builds the client for the API server of the node's own cluster, and determines that server's address. Sends no
//! request.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

/// Timeout of a connection attempt. It does not apply to an idle watch.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A client and the address of its server.
#[derive(Clone)]
pub struct Connection {
    /// Uses the Pod's service account or the kubeconfig's user.
    pub client: Client,
    /// The server's host and port, as configured.
    pub server: Server,
}

/// The host and port of an API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// An address; `Err` = a host name that must be resolved.
    pub host: Result<IpAddr, String>,
    /// TCP port.
    pub port: u16,
}

impl Server {
    /// The socket address of the server; `None` = it is configured by host name.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.host.as_ref().ok().map(|ip| SocketAddr::new(*ip, self.port))
    }
}

/// Why the client cannot be built. No request is sent, so an unreachable API server is not an error.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The kubeconfig cannot be used.
    #[error("--kubeconfig {0}: {1}")]
    Kubeconfig(PathBuf, #[source] Box<kube::config::KubeconfigError>),
    /// There is no service account.
    #[error(
        "no --kubeconfig is given and there is no service account in this process's file system: {0}; run as a Pod with \
         automountServiceAccountToken, or set --kubeconfig"
    )]
    InCluster(#[source] kube::config::InClusterError),
    /// The configuration is read, but kube cannot build a client from it, for example because of its TLS settings.
    #[error("cannot set up the client for the API server: {0}")]
    Client(#[source] kube::Error),
}

/// Reads the configuration and builds the client; does not connect.
pub async fn build(kubeconfig: Option<&Path>) -> Result<Connection, ClientError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let error = |e| ClientError::Kubeconfig(path.to_owned(), Box::new(e));
            let file = Kubeconfig::read_from(path).map_err(error)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .map_err(error)?
        }
        None => Config::incluster().map_err(ClientError::InCluster)?,
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    let server = parse_server(&config.cluster_url);
    let client = clustermesh_daemon::client::build(&config).map_err(ClientError::Client)?;
    Ok(Connection { client, server })
}

fn parse_server(url: &http::Uri) -> Server {
    let host = url.host().unwrap_or_default();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let default = if url.scheme_str() == Some("http") { 80 } else { 443 };
    Server {
        host: bare.parse().map_err(|_| host.to_owned()),
        port: url.port_u16().unwrap_or(default),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_is_parsed_from_url_with_address_or_host_name() {
        let parse = |text: &str| parse_server(&text.parse().unwrap());
        assert_eq!(
            parse("https://10.95.0.1:443").address(),
            Some("10.95.0.1:443".parse().unwrap())
        );
        assert_eq!(
            parse("https://[fd00::1]:6443/").address(),
            Some("[fd00::1]:6443".parse().unwrap())
        );
        assert_eq!(
            parse("https://127.0.0.1").address(),
            Some("127.0.0.1:443".parse().unwrap())
        );
        assert_eq!(
            parse("https://api.example.org:6443"),
            Server {
                host: Err("api.example.org".into()),
                port: 6443
            }
        );
    }
}
