//! Converts the text of a member's kubeconfig to a client configuration, or refuses it. A kubeconfig is hostile input, so only checked
//! fields are copied into the configuration.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::{Arc, PoisonError, RwLock},
};

use http::HeaderValue;
use kube::config::{
    AuthInfo, Cluster, Config, Context, KubeConfigOptions, Kubeconfig, NamedAuthInfo, NamedCluster, NamedContext,
};
use secrecy::ExposeSecret;

/// The largest kubeconfig that is accepted.
const MAX_BYTES: usize = 512 * 1024;

/// Why a kubeconfig is refused. Each message names the problem, and the remedy if there is one. No message repeats a value, which may be
/// secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The text is not the YAML of a kubeconfig.
    #[error(
        "the kubeconfig does not parse: it must be the YAML that `kubectl config view --raw --minify --flatten` prints"
    )]
    Malformed,
    /// The text is too large.
    #[error("the kubeconfig is larger than {} KiB: keep one context, with `kubectl config view --raw --minify --flatten`", MAX_BYTES / 1024)]
    TooLarge,
    /// A required field is missing.
    #[error("the kubeconfig lacks {field}: {remedy}")]
    Lacks {
        /// Path of the field.
        field: &'static str,
        /// The instruction for the author.
        remedy: &'static str,
    },
    /// A field is not allowed.
    #[error("the kubeconfig has {field}, which is refused: {remedy}")]
    Has {
        /// Path of the field.
        field: &'static str,
        /// The instruction for the author.
        remedy: &'static str,
    },
    /// `clusters[].cluster.server` has a host, an address or a form that is not allowed.
    #[error("the kubeconfig's clusters[].cluster.server is refused: {0}")]
    Server(&'static str),
    /// A value is invalid.
    #[error("the kubeconfig's {field} is not valid: {remedy}")]
    Invalid {
        /// Path of the field.
        field: &'static str,
        /// The instruction for the author.
        remedy: &'static str,
    },
}

mod addresses;

use addresses::translated_addresses;

/// Hosts and addresses of the hub's own API server. No kubeconfig of a member may name them. Cheap to clone; all clones share one
/// value.
#[derive(Debug, Clone, Default)]
pub struct HubHosts {
    /// Host names and IP addresses, each with its port, at which this process itself reaches the hub's API server.
    hosts: Arc<BTreeSet<(String, u16)>>,
    /// The addresses on which the hub's API servers listen. [`HubHosts::set_addresses`] sets them.
    addresses: Arc<RwLock<BTreeSet<SocketAddr>>>,
}

const IS_HUB: Refused =
    Refused::Server("it is the hub's own API server; the hub's entry is the one with `local: true`");

impl HubHosts {
    /// Creates a value with these hosts and ports of the API server.
    #[must_use]
    pub fn new(hosts: impl IntoIterator<Item = (String, u16)>) -> Self {
        Self {
            hosts: Arc::new(hosts.into_iter().collect()),
            addresses: Arc::default(),
        }
    }

    /// Sets the addresses on which the hub's API servers listen.
    pub fn set_addresses(&self, addresses: BTreeSet<SocketAddr>) {
        *self.addresses.write().unwrap_or_else(PoisonError::into_inner) = addresses;
    }

    /// Refuses the addresses that [`check_address`] refuses, and those of the hub's API server.
    ///
    /// # Errors
    /// [`Refused::Server`] with the reason.
    pub fn check(&self, address: IpAddr, port: u16) -> Result<(), Refused> {
        check_address(address)?;
        let known = self.addresses.read().unwrap_or_else(PoisonError::into_inner);
        for address in translated_addresses(address) {
            if known.contains(&SocketAddr::new(address, port)) || self.hosts.contains(&(address.to_string(), port)) {
                return Err(IS_HUB);
            }
        }
        Ok(())
    }

    fn has_host(&self, host: &str, port: u16) -> bool {
        // In a pod, `kubernetes.default` and its longer forms (`kubernetes.default.svc`) are the hub's API server. In namespace default,
        // `kubernetes` is too. They are refused at every port.
        let is_service = matches!(host, "kubernetes" | "kubernetes.default") || host.starts_with("kubernetes.default.");
        is_service || self.hosts.contains(&(host.to_owned(), port))
    }
}

/// Normalizes the host of a URL for comparisons: without brackets and final dot, in lower case.
pub(crate) fn host_of(host: &str) -> String {
    host.trim_start_matches('[')
        .trim_end_matches(']')
        .trim_end_matches('.')
        .to_ascii_lowercase()
}

// What the author of a kubeconfig can do about a refused field.
const REMEDY_FLATTEN: &str = "put the value itself into the Secret (`kubectl config view --raw --minify --flatten`)";
const REMEDY_STATIC: &str = "give the account a token or a client certificate inside the kubeconfig";

/// Reads the client configuration of a context (`None` = the current one).
///
/// # Errors
/// The kubeconfig is too large, does not parse, lacks a required field, or has a value or field that is not allowed, such as one that
/// would run a program, read a file, accept an unverified server or reach a forbidden address.
pub async fn read(text: &[u8], context: Option<&str>, hub: &HubHosts) -> Result<Config, Refused> {
    let clean = sanitise(text, context, hub)?;
    let invalid = Refused::Invalid {
        field: "certificate-authority-data, client-certificate-data or client-key-data",
        remedy: "each must be base64 of PEM",
    };
    let mut config = Config::from_custom_kubeconfig(clean, &KubeConfigOptions::default())
        .await
        .map_err(|_| invalid)?;
    config.connect_timeout = Some(std::time::Duration::from_secs(10));
    // The callers retry with backoff. If the client also retried, its errors would reach them later.
    config.default_retry = false;
    Ok(config)
}

/// Copies the checked fields of one context into a new kubeconfig.
fn sanitise(text: &[u8], context: Option<&str>, hub: &HubHosts) -> Result<Kubeconfig, Refused> {
    if text.len() > MAX_BYTES {
        return Err(Refused::TooLarge);
    }
    let text = std::str::from_utf8(text).map_err(|_| Refused::Malformed)?;
    let given = Kubeconfig::from_yaml(text).map_err(|_| Refused::Malformed)?;

    let chosen = context.or(given.current_context.as_deref()).ok_or(Refused::Lacks {
        field: "current-context",
        remedy: "set it, or name a context in kubeconfigSecretRef.context",
    })?;
    let no_context = Refused::Lacks {
        field: "the selected context",
        remedy: "kubeconfigSecretRef.context or current-context must name one of contexts[]",
    };
    let context = given
        .contexts
        .iter()
        .find(|c| c.name == chosen)
        .and_then(|c| c.context.as_ref())
        .ok_or(no_context)?;
    let cluster = given
        .clusters
        .iter()
        .find(|c| c.name == context.cluster)
        .and_then(|c| c.cluster.as_ref())
        .ok_or(Refused::Lacks {
            field: "the context's cluster",
            remedy: "contexts[].context.cluster must name one of clusters[]",
        })?;
    let user = given
        .auth_infos
        .iter()
        .find(|u| Some(&u.name) == context.user.as_ref())
        .and_then(|u| u.auth_info.as_ref())
        .ok_or(Refused::Lacks {
            field: "the context's user",
            remedy: "contexts[].context.user must name one of users[]",
        })?;

    Ok(Kubeconfig {
        current_context: Some("member".to_owned()),
        contexts: vec![NamedContext {
            name: "member".to_owned(),
            context: Some(Context {
                cluster: "member".to_owned(),
                user: Some("member".to_owned()),
                ..Context::default()
            }),
            other: Default::default(),
        }],
        clusters: vec![NamedCluster {
            name: "member".to_owned(),
            cluster: Some(check_cluster(cluster, hub)?),
            other: Default::default(),
        }],
        auth_infos: vec![NamedAuthInfo {
            name: "member".to_owned(),
            auth_info: Some(check_user(user)?),
            other: Default::default(),
        }],
        ..Kubeconfig::default()
    })
}

fn check_cluster(given: &Cluster, hub: &HubHosts) -> Result<Cluster, Refused> {
    if given.insecure_skip_tls_verify == Some(true) {
        let remedy = "put the cluster's CA into certificate-authority-data";
        return Err(Refused::Has {
            field: "clusters[].cluster.insecure-skip-tls-verify",
            remedy,
        });
    }
    if given.certificate_authority.is_some() {
        return Err(Refused::Has {
            field: "clusters[].cluster.certificate-authority (a file path)",
            remedy: REMEDY_FLATTEN,
        });
    }
    if given.proxy_url.is_some() {
        let remedy = "the API server must be reachable without a proxy";
        return Err(Refused::Has {
            field: "clusters[].cluster.proxy-url",
            remedy,
        });
    }
    let Some(ca) = non_empty(given.certificate_authority_data.as_ref()) else {
        let remedy = "the CA that signed the API server's certificate, base64 of PEM";
        return Err(Refused::Lacks {
            field: "clusters[].cluster.certificate-authority-data",
            remedy,
        });
    };
    let Some(server) = non_empty(given.server.as_ref()) else {
        let remedy = "the API server's URL, https://host:port";
        return Err(Refused::Lacks {
            field: "clusters[].cluster.server",
            remedy,
        });
    };
    check_server(server, hub)?;
    Ok(Cluster {
        server: Some(server.clone()),
        certificate_authority_data: Some(ca.clone()),
        tls_server_name: given.tls_server_name.clone(),
        ..Cluster::default()
    })
}

fn check_user(given: &AuthInfo) -> Result<AuthInfo, Refused> {
    let has = |field, remedy| Err(Refused::Has { field, remedy });
    if given.exec.is_some() {
        return has("users[].user.exec", REMEDY_STATIC);
    }
    if given.auth_provider.is_some() {
        return has("users[].user.auth-provider", REMEDY_STATIC);
    }
    if given.token_file.is_some() {
        return has("users[].user.tokenFile", REMEDY_FLATTEN);
    }
    if given.client_certificate.is_some() {
        return has("users[].user.client-certificate (a file path)", REMEDY_FLATTEN);
    }
    if given.client_key.is_some() {
        return has("users[].user.client-key (a file path)", REMEDY_FLATTEN);
    }
    if given.username.is_some() || given.password.is_some() {
        return has("users[].user.username or password", REMEDY_STATIC);
    }
    let impersonates = given.impersonate.is_some()
        || given.impersonate_uid.is_some()
        || given.impersonate_groups.is_some()
        || given.impersonate_user_extra.is_some();
    if impersonates {
        return has(
            "users[].user.as (impersonation)",
            "use the credentials of the account itself",
        );
    }
    let certificate = non_empty(given.client_certificate_data.as_ref());
    match (&given.token, certificate, &given.client_key_data) {
        // kube panics if the header with the token is invalid.
        (Some(token), None, None) if HeaderValue::from_str(token.expose_secret()).is_err() => Err(Refused::Invalid {
            field: "users[].user.token",
            remedy: "remove line breaks and other control characters",
        }),
        (Some(token), None, None) => Ok(AuthInfo {
            token: Some(token.clone()),
            ..AuthInfo::default()
        }),
        (None, Some(certificate), Some(key)) => Ok(AuthInfo {
            client_certificate_data: Some(certificate.clone()),
            client_key_data: Some(key.clone()),
            ..AuthInfo::default()
        }),
        (None, None, None) => Err(Refused::Lacks {
            field: "users[].user.token",
            remedy: REMEDY_STATIC,
        }),
        (None, ..) => Err(Refused::Lacks {
            field: "users[].user.client-certificate-data or client-key-data",
            remedy: "a client certificate needs both",
        }),
        (Some(_), ..) => has(
            "users[].user.token as well as a client certificate",
            "keep one of the two",
        ),
    }
}

fn check_server(server: &str, hub: &HubHosts) -> Result<(), Refused> {
    let invalid = || Refused::Invalid {
        field: "clusters[].cluster.server",
        remedy: "write https://host:port",
    };
    let uri: http::Uri = server.parse().map_err(|_| invalid())?;
    if uri.scheme_str() != Some("https") {
        return Err(Refused::Server("only https:// is allowed"));
    }
    let authority = uri.authority().ok_or_else(invalid)?;
    if authority.as_str().contains('@') {
        return Err(Refused::Server("a user name in the URL is not supported"));
    }
    if uri.query().is_some() {
        return Err(invalid());
    }
    let host = host_of(authority.host());
    let port = authority.port_u16().unwrap_or(443);
    if hub.has_host(&host, port) {
        return Err(IS_HUB);
    }
    if host == "localhost" || host.ends_with(".localhost") {
        return Err(Refused::Server("it is the controller's own host"));
    }
    match host.parse() {
        Ok(address) => hub.check(address, port),
        // A host that ends with a digit is refused, because the resolver accepts 127.1, 0x7f000001 and 2130706433 as addresses, too.
        // When the client connects, `crate::connect` checks the addresses to which any other host resolves.
        Err(_) if host.bytes().next_back().is_some_and(|b| b.is_ascii_digit()) || host.is_empty() => Err(invalid()),
        Err(_) => Ok(()),
    }
}

/// Refuses loopback and link-local addresses, and addresses that no host can have. An IPv6 address is also refused if a NAT64
/// translator or a tunnel would convert it to such an IPv4 address.
///
/// # Errors
/// [`Refused::Server`], which names the kind of address.
pub fn check_address(address: IpAddr) -> Result<(), Refused> {
    translated_addresses(address)
        .into_iter()
        .try_for_each(check_single_address)
}

fn check_single_address(address: IpAddr) -> Result<(), Refused> {
    if address.is_loopback() {
        return Err(Refused::Server("it is a loopback address"));
    }
    // On Linux, a connection to 0.0.0.0 reaches the host itself. The rest of 0.0.0.0/8, and 240.0.0.0/4, are reserved.
    let is_reserved = match address {
        IpAddr::V4(v4) => matches!(v4.octets()[0], 0 | 240..),
        IpAddr::V6(v6) => v6.is_unspecified(),
    };
    if is_reserved || address.is_multicast() {
        return Err(Refused::Server("it is no address of a host"));
    }
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    if link_local {
        return Err(Refused::Server("it is a link-local address"));
    }
    Ok(())
}

fn non_empty(text: Option<&String>) -> Option<&String> {
    text.filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests;
