//! Parses the command-line flags that give rights to namespaces of the hub: `--hub-namespace`, `--member-namespace`,
//! `--hub-network`.

use std::str::FromStr;

use ipnet::IpNet;

use crate::mesh::Profile;

/// One `--hub-namespace NAMESPACE[=PROFILE[,CIDR...]]`: a mesh in the namespace may have a local entry (the hub's own cluster).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubNamespace {
    /// The namespace, or `*` for all.
    pub namespace: String,
    /// The least restrictive profile that a non-local entry of a mesh in the namespace may have: cluster-meshed is the least
    /// restrictive, then sandbox, then standard.
    pub profile_limit: Profile,
    /// Networks that non-local entries of a mesh in the namespace may list; the host bits are zero. Empty = every network if
    /// `profile_limit` is cluster-meshed, else none.
    pub networks: Vec<IpNet>,
}

/// One `--member-namespace NAMESPACE,CIDR[,CIDR...]`: a mesh in the namespace may connect members with each other, but without a
/// [`HubNamespace`] for the same namespace it may not have a local entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberNamespace {
    /// The namespace, or `*` for all.
    pub namespace: String,
    /// Networks that non-local entries of a mesh in the namespace may list, at least one; the host bits are zero.
    pub networks: Vec<IpNet>,
}

/// One network of `--hub-network`: a network of the hub's own cluster; the host bits are zero. If `--hub-namespace` or
/// `--member-namespace` limits the networks of a namespace, the local entry of a mesh there may list only networks inside those
/// of `--hub-network`, and no other entry may list a network that overlaps one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HubNetwork(pub IpNet);

/// Why a value is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlagError {
    /// The text before the `=` (without a `=`: the whole text) is not a namespace.
    #[error(
        "{0:?}: write NAMESPACE, NAMESPACE=PROFILE or NAMESPACE=PROFILE,CIDR such as team-x=sandbox,100.80.16.0/20 (`*` = every namespace)"
    )]
    MalformedHubNamespace(String),
    /// The profile does not exist.
    #[error("{0:?}: the profile must be cluster-meshed, sandbox or standard")]
    Profile(String),
    /// The text before the first comma is not a namespace, or there is no comma.
    #[error("{0:?}: write NAMESPACE,CIDR such as team-x,10.20.0.0/16 (`*` = every namespace)")]
    MalformedMemberNamespace(String),
    /// The text is not a network.
    #[error("{0:?} is not a network: write an address and a prefix length, such as 100.80.16.0/20")]
    Network(String),
}

fn is_namespace(text: &str) -> bool {
    !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || matches!(c, '/' | '=' | ','))
}

fn parse_network(text: &str) -> Result<IpNet, FlagError> {
    let parsed = text.parse::<IpNet>();
    parsed
        .map(|network| network.trunc())
        .map_err(|_| FlagError::Network(text.to_owned()))
}

impl FromStr for HubNamespace {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (namespace, rights) = text
            .split_once('=')
            .map_or((text, "cluster-meshed"), |(namespace, rights)| (namespace, rights));
        if !is_namespace(namespace) {
            return Err(FlagError::MalformedHubNamespace(text.to_owned()));
        }
        let mut values = rights.split(',');
        let profile_limit = match values.next() {
            Some("cluster-meshed") => Profile::ClusterMeshed,
            Some("sandbox") => Profile::Sandbox,
            Some("standard") => Profile::Standard,
            _ => return Err(FlagError::Profile(text.to_owned())),
        };
        Ok(Self {
            namespace: namespace.to_owned(),
            profile_limit,
            networks: values.map(parse_network).collect::<Result<_, _>>()?,
        })
    }
}

impl FromStr for MemberNamespace {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || FlagError::MalformedMemberNamespace(text.to_owned());
        let (namespace, networks) = text.split_once(',').ok_or_else(malformed)?;
        if !is_namespace(namespace) {
            return Err(malformed());
        }
        Ok(Self {
            namespace: namespace.to_owned(),
            networks: networks.split(',').map(parse_network).collect::<Result<_, _>>()?,
        })
    }
}

impl FromStr for HubNetwork {
    type Err = FlagError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_network(text).map(Self)
    }
}
