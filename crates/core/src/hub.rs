//! Restricts which namespaces of the hub may have a `ClusterMesh`, and what the meshes of each namespace may use: the hub itself
//! (`local: true`), profiles, networks. The restrictions apply before [`crate::plan`] decides the networks of a mesh.

use std::collections::BTreeMap;

use ipnet::IpNet;

use crate::mesh::{Cluster, ClusterIdentity, Mesh, Profile, overlap};

mod flags;

#[cfg(test)]
mod tests;

pub use flags::{FlagError, HubNamespace, HubNetwork, MemberNamespace};

/// What the meshes of one namespace may use.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rights {
    /// An entry may have `local: true`.
    local: bool,
    /// The least restrictive profile that a non-local entry may have.
    max_profile: Profile,
    /// The networks that a non-local entry may list. `None` = any entry, also the local one, may list any network.
    networks: Option<Vec<IpNet>>,
}

/// The rights of each namespace of the hub.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HubNamespaces {
    namespaces: BTreeMap<String, Rights>,
    /// The networks that the local entry may list in a namespace with a list of networks.
    hub_networks: Vec<IpNet>,
}

impl HubNamespaces {
    /// Builds the rights from the flags. Without `--hub-namespace` only `own` may use the hub: the namespace in which the
    /// controller runs. If a namespace has two flags, the networks of both and the more restrictive profile apply.
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
            known.local |= rights.local;
            known.max_profile = known.max_profile.max(rights.max_profile);
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
                    local: true,
                    max_profile: Profile::ClusterMeshed,
                    networks: None,
                },
            );
        }
        for flag in hub_namespaces {
            // A namespace that is limited to a more restrictive profile than cluster-meshed may use only listed networks.
            let bound = flag.max_profile > Profile::ClusterMeshed || !flag.networks.is_empty();
            add(
                &flag.namespace,
                Rights {
                    local: true,
                    max_profile: flag.max_profile,
                    networks: bound.then(|| flag.networks.clone()),
                },
            );
        }
        for flag in member_namespaces {
            add(
                &flag.namespace,
                Rights {
                    local: false,
                    max_profile: Profile::ClusterMeshed,
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

    /// Why this mesh is refused: the reason and the message of its Ready condition.
    #[must_use]
    pub fn refuses(&self, mesh: &Mesh) -> Option<(&'static str, String)> {
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
                        "no ClusterMesh is served in namespace {namespace}: write it in {allowed}, or start the controller \
                         with --member-namespace={namespace},CIDR,... and the networks of its members"
                    ),
                ),
            });
        };
        if let Some(local) = local.filter(|_| !rights.local) {
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
                self.unlisted(rights, namespace, &mesh.clusters)
                    .map(|message| ("NetworksNotAllowed", message))
            })
    }

    /// The first network of an entry that the operator did not list for this namespace, with the remedy.
    fn unlisted(&self, rights: &Rights, namespace: &str, clusters: &[Cluster]) -> Option<String> {
        rights.networks.as_ref()?;
        for entry in clusters {
            let Some(network) = entry
                .allowed
                .iter()
                .find(|network| !self.admits(rights, entry, **network))
            else {
                continue;
            };
            let (list, flag) = if is_local(entry) {
                (&self.hub_networks[..], "--hub-network=CIDR,...".to_owned())
            } else {
                let flag = if rights.local {
                    format!("--hub-namespace={namespace}={},CIDR,...", rights.max_profile.as_str())
                } else {
                    format!("--member-namespace={namespace},CIDR,...")
                };
                (rights.networks.as_deref().unwrap_or_default(), flag)
            };
            let of_the_hub = self.hub_networks.iter().find(|hub| overlap(**hub, *network));
            let why = match of_the_hub.filter(|_| !is_local(entry)) {
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

    fn admits(&self, rights: &Rights, entry: &Cluster, network: IpNet) -> bool {
        let Some(networks) = &rights.networks else {
            return true;
        };
        if is_local(entry) {
            return self.hub_networks.iter().any(|listed| listed.contains(&network));
        }
        networks.iter().any(|listed| listed.contains(&network))
            && !self.hub_networks.iter().any(|hub| overlap(*hub, network))
    }

    /// Removes networks outside the lists, and a profile or quarantine of the hub's own entry. A refused mesh still takes part
    /// in the plan, and must not claim these.
    pub fn confine(&self, mesh: &mut Mesh) {
        let namespace = &mesh.id.namespace;
        let rights = self.rights(namespace);
        let bound = rights.is_none_or(|rights| rights.networks.is_some());
        let confined = rights.is_some_and(|rights| rights.max_profile > Profile::ClusterMeshed);
        for local in mesh.clusters.iter_mut().filter(|entry| is_local(entry)) {
            local.confined_to = confined.then(|| namespace.clone());
            if bound {
                local.profile = Profile::ClusterMeshed;
                local.quarantine = false;
            }
        }
        let Some(rights) = rights else {
            mesh.accepted.clear();
            mesh.clusters.iter_mut().for_each(|entry| entry.allowed.clear());
            return;
        };
        if !bound {
            return;
        }
        for entry in &mut mesh.clusters {
            let mut allowed = std::mem::take(&mut entry.allowed);
            allowed.retain(|network| self.admits(rights, entry, *network));
            entry.allowed = allowed;
        }
        let clusters = &mesh.clusters;
        mesh.accepted.retain(|name, networks| {
            let entry = clusters.iter().find(|entry| entry.name == *name);
            networks.retain(|network| entry.is_some_and(|entry| self.admits(rights, entry, *network)));
            !networks.is_empty()
        });
    }
}

impl Rights {
    /// Reports the first entry with a less restrictive profile than the namespace allows. Also reports a local entry that restricts
    /// the hub, if the namespace has a list of networks: the profile and quarantine of the hub in one mesh apply in all meshes.
    fn forbidden_profile(&self, namespace: &str, clusters: &[Cluster]) -> Option<String> {
        let members = || clusters.iter().filter(|entry| !is_local(entry));
        if let Some(wide) = members().find(|entry| entry.profile < self.max_profile) {
            return Some(format!(
                "entry {:?} has a profile that --hub-namespace does not allow in namespace {namespace}: set its isolationProfile to {} or a \
                 more restrictive one",
                wide.name,
                self.max_profile.as_str(),
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
