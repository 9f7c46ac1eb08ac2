//! Restricts the namespaces of the hub in which a `ClusterMesh` is accepted, and decides for each namespace whether a mesh may have a
//! local entry, and which profiles and networks its entries may have. The restrictions apply before [`crate::plan`] decides the
//! networks of a mesh.

use std::collections::BTreeMap;

use ipnet::IpNet;

use crate::mesh::{Cluster, ClusterIdentity, Mesh, Profile, overlap};

mod flags;

#[cfg(test)]
mod tests;

pub use flags::{FlagError, HubNamespace, HubNetwork, MemberNamespace};

/// The rights of the meshes in one namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rights {
    /// An entry may have `local: true`.
    allows_local: bool,
    /// The least restrictive profile that a non-local entry may have.
    profile_limit: Profile,
    /// The networks that a non-local entry may list, except those that overlap [`HubNamespaces::hub_networks`]. `None` = any entry, also
    /// the local one, may list any network.
    networks: Option<Vec<IpNet>>,
}

/// The rights of each namespace of the hub.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HubNamespaces {
    namespaces: BTreeMap<String, Rights>,
    /// The networks that the local entry may list in a namespace whose networks are limited ([`Rights::networks`]).
    hub_networks: Vec<IpNet>,
}

impl HubNamespaces {
    /// Builds the rights from the flags. Without `--hub-namespace`, only `own`, the namespace in which the controller runs, may have
    /// local entries. If a namespace has two flags, the more restrictive profile and the networks of both lists apply. A flag without a
    /// list does not lift the other flag's limit.
    #[must_use]
    pub fn new(
        hub_namespaces: &[HubNamespace],
        member_namespaces: &[MemberNamespace],
        hub_networks: &[HubNetwork],
        own: &str,
    ) -> Self {
        let mut namespaces: BTreeMap<String, Rights> = BTreeMap::new();
        let mut add = |namespace: &str, rights: Rights| {
            let Some(known) = namespaces.get_mut(namespace) else {
                namespaces.insert(namespace.to_owned(), rights);
                return;
            };
            known.allows_local |= rights.allows_local;
            known.profile_limit = known.profile_limit.max(rights.profile_limit);
            match (&mut known.networks, rights.networks) {
                (Some(known), Some(more)) => known.extend(more),
                (known @ None, Some(list)) => *known = Some(list),
                (_, None) => {}
            }
        };
        if hub_namespaces.is_empty() {
            add(
                own,
                Rights {
                    allows_local: true,
                    profile_limit: Profile::ClusterMeshed,
                    networks: None,
                },
            );
        }
        for flag in hub_namespaces {
            // A namespace that is limited to a more restrictive profile than cluster-meshed may use only listed networks.
            let is_limited = flag.profile_limit > Profile::ClusterMeshed || !flag.networks.is_empty();
            add(
                &flag.namespace,
                Rights {
                    allows_local: true,
                    profile_limit: flag.profile_limit,
                    networks: is_limited.then(|| flag.networks.clone()),
                },
            );
        }
        for flag in member_namespaces {
            add(
                &flag.namespace,
                Rights {
                    allows_local: false,
                    profile_limit: Profile::ClusterMeshed,
                    networks: Some(flag.networks.clone()),
                },
            );
        }
        Self {
            namespaces,
            hub_networks: hub_networks.iter().map(|network| network.0).collect(),
        }
    }

    fn rights(&self, namespace: &str) -> Option<&Rights> {
        self.namespaces.get(namespace).or_else(|| self.namespaces.get("*"))
    }

    /// Why this mesh is refused, as reason and message of its Ready condition; `None` = it is accepted.
    #[must_use]
    pub fn find_refusal(&self, mesh: &Mesh) -> Option<(&'static str, String)> {
        let namespace = &mesh.id.namespace;
        let local = mesh.clusters.iter().find(|cluster| is_local(cluster));
        let Some(rights) = self.rights(namespace) else {
            let allowed: Vec<&str> = self.namespaces.keys().map(String::as_str).collect();
            let allowed = allowed.join(" or ");
            return Some(match local {
                Some(local) => (
                    "LocalNotAllowed",
                    format!(
                        "entry {:?} has `local: true`, which is not allowed in namespace {namespace}: write the mesh in \
                         {allowed}, or start the controller with --hub-namespace={namespace}",
                        local.name
                    ),
                ),
                None => (
                    "NamespaceNotAllowed",
                    format!(
                        "no ClusterMesh is accepted in namespace {namespace}: create it in {allowed}, or start the controller \
                         with --member-namespace={namespace},CIDR,... and the networks of its members"
                    ),
                ),
            });
        };
        if let Some(local) = local.filter(|_| !rights.allows_local) {
            let message = format!(
                "entry {:?} has `local: true`, which is not allowed in namespace {namespace}: remove the entry, or start \
                 the controller with --hub-namespace={namespace}",
                local.name
            );
            return Some(("LocalNotAllowed", message));
        }
        rights
            .forbidden_profile(namespace, &mesh.clusters)
            .map(|message| ("ProfileNotAllowed", message))
            .or_else(|| {
                self.unlisted_network(rights, namespace, &mesh.clusters)
                    .map(|message| ("NetworksNotAllowed", message))
            })
    }

    /// Returns a message with the remedy, if an entry has a network that the flags do not allow in this namespace.
    fn unlisted_network(&self, rights: &Rights, namespace: &str, clusters: &[Cluster]) -> Option<String> {
        rights.networks.as_ref()?;
        for entry in clusters {
            let Some(network) = entry
                .allowed
                .iter()
                .find(|network| !self.allows(rights, entry, **network))
            else {
                continue;
            };
            let (list, flag) = if is_local(entry) {
                (&self.hub_networks[..], "--hub-network=CIDR,...".to_owned())
            } else {
                let flag = if rights.allows_local {
                    format!("--hub-namespace={namespace}={},CIDR,...", rights.profile_limit.as_str())
                } else {
                    format!("--member-namespace={namespace},CIDR,...")
                };
                (rights.networks.as_deref().unwrap_or_default(), flag)
            };
            let hub_network = self.hub_networks.iter().find(|hub| overlap(**hub, *network));
            let why = match hub_network.filter(|_| !is_local(entry)) {
                Some(hub) => format!("which overlaps {hub}, a network of the hub (--hub-network)"),
                None if list.is_empty() => "and no network is listed for it".to_owned(),
                None => {
                    let list: Vec<String> = list.iter().map(ToString::to_string).collect();
                    format!("which lies outside those that are listed for it: {}", list.join(", "))
                }
            };
            return Some(format!(
                "allowedNetworks of entry {:?} has {network}, {why}. Meshes of namespace {namespace} use listed networks \
                 only: change the entry, or have the operator of the hub start the controller with {flag}",
                entry.name
            ));
        }
        None
    }

    fn allows(&self, rights: &Rights, entry: &Cluster, network: IpNet) -> bool {
        let Some(networks) = &rights.networks else {
            return true;
        };
        if is_local(entry) {
            return self.hub_networks.iter().any(|listed| listed.contains(&network));
        }
        networks.iter().any(|listed| listed.contains(&network))
            && !self.hub_networks.iter().any(|hub| overlap(*hub, network))
    }

    /// Removes from a mesh the networks that its namespace does not allow, and limits its local entry. The caller also reduces refused
    /// meshes, because they still take part in the plan.
    ///
    /// - A namespace with limited networks or without rights: networks outside the lists are removed. The profile and quarantine of the
    ///   local entry are ignored, because they would restrict the hub in all meshes.
    /// - A namespace with limited profiles: the local entry is confined ([`Cluster::confined_to`]).
    pub fn reduce_to_allowed(&self, mesh: &mut Mesh) {
        let namespace = &mesh.id.namespace;
        let rights = self.rights(namespace);
        let has_network_limit = rights.is_none_or(|rights| rights.networks.is_some());
        let has_profile_limit = rights.is_some_and(|rights| rights.profile_limit > Profile::ClusterMeshed);
        for local in mesh.clusters.iter_mut().filter(|entry| is_local(entry)) {
            local.confined_to = has_profile_limit.then(|| namespace.clone());
            if has_network_limit {
                local.profile = Profile::ClusterMeshed;
                local.quarantine = false;
            }
        }
        let Some(rights) = rights else {
            mesh.accepted.clear();
            mesh.clusters.iter_mut().for_each(|entry| entry.allowed.clear());
            return;
        };
        if !has_network_limit {
            return;
        }
        for entry in &mut mesh.clusters {
            let mut allowed = std::mem::take(&mut entry.allowed);
            allowed.retain(|network| self.allows(rights, entry, *network));
            entry.allowed = allowed;
        }
        let clusters = &mesh.clusters;
        mesh.accepted.retain(|name, networks| {
            let entry = clusters.iter().find(|entry| entry.name == *name);
            networks.retain(|network| entry.is_some_and(|entry| self.allows(rights, entry, *network)));
            !networks.is_empty()
        });
    }
}

impl Rights {
    /// Reports the first entry with a less restrictive profile than the namespace allows. Also reports a local entry that restricts
    /// the hub, if the networks of the namespace are limited: the profile and quarantine of the hub in one mesh apply in all meshes.
    fn forbidden_profile(&self, namespace: &str, clusters: &[Cluster]) -> Option<String> {
        let mut non_local = clusters.iter().filter(|entry| !is_local(entry));
        if let Some(too_permissive) = non_local.find(|entry| entry.profile < self.profile_limit) {
            return Some(format!(
                "entry {:?} has a profile that --hub-namespace does not allow in namespace {namespace}: set its isolationProfile to {} or \
                 a more restrictive one",
                too_permissive.name,
                self.profile_limit.as_str(),
            ));
        }
        self.networks.as_ref()?;
        let local = clusters.iter().find(|entry| is_local(entry))?;
        let field = if local.quarantine {
            "quarantine"
        } else if local.profile > Profile::ClusterMeshed {
            "isolationProfile"
        } else {
            return None;
        };
        Some(format!(
            "{field} of entry {:?} would close the hub to the meshes of all namespaces, which meshes of namespace {namespace} must \
             not do: remove it, or set it in a mesh of a namespace without a list of networks",
            local.name
        ))
    }
}

fn is_local(entry: &Cluster) -> bool {
    entry.identity == ClusterIdentity::Local
}
