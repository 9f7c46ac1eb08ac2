//! Which namespaces of the hub may use the controller's own rights (`local: true`), and how far: `--hub-namespace`. What a mesh
//! that may stand comes to is [`crate::plan`]'s.

use std::{collections::BTreeMap, str::FromStr};

use crate::mesh::{ClusterIdentity, Mesh, Profile};

/// One `--hub-namespace NS[=max-profile]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubNamespace {
    /// The namespace, or `*` for every one.
    pub namespace: String,
    /// The widest profile that a non-local entry of a mesh there may have.
    pub max_profile: Profile,
}

/// Why a `--hub-namespace` is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HubNamespaceError {
    /// No namespace before the `=`.
    #[error("{0:?}: write NAMESPACE or NAMESPACE=PROFILE (`*` = every namespace)")]
    NoNamespace(String),
    /// No such profile.
    #[error("{0:?}: the profile must be cluster-meshed, sandbox or standard")]
    Profile(String),
}

impl FromStr for HubNamespace {
    type Err = HubNamespaceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (namespace, profile) = text
            .split_once('=')
            .map_or((text, None), |(name, profile)| (name, Some(profile)));
        if namespace.is_empty() || namespace.contains(|c: char| c.is_whitespace() || c == '/') {
            return Err(HubNamespaceError::NoNamespace(text.to_owned()));
        }
        let max_profile = match profile {
            None | Some("cluster-meshed") => Profile::ClusterMeshed,
            Some("sandbox") => Profile::Sandbox,
            Some("standard") => Profile::Standard,
            Some(_) => return Err(HubNamespaceError::Profile(text.to_owned())),
        };
        Ok(Self {
            namespace: namespace.to_owned(),
            max_profile,
        })
    }
}

/// The namespaces in which `local: true` is allowed, with the widest profile for each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HubNamespaces(BTreeMap<String, Profile>);

impl HubNamespaces {
    /// As the flags say; without any, `own` alone: the namespace that the controller runs in.
    #[must_use]
    pub fn new(flags: &[HubNamespace], own: &str) -> Self {
        if flags.is_empty() {
            return Self([(own.to_owned(), Profile::ClusterMeshed)].into());
        }
        Self(
            flags
                .iter()
                .map(|flag| (flag.namespace.clone(), flag.max_profile))
                .collect(),
        )
    }

    /// Why this mesh may not stand where it stands; the word and the message of its Ready condition.
    #[must_use]
    pub fn refuses(&self, mesh: &Mesh) -> Option<(&'static str, String)> {
        let local = mesh
            .clusters
            .iter()
            .find(|cluster| cluster.identity == ClusterIdentity::Local)?;
        let namespace = &mesh.id.namespace;
        let Some(&max) = self.0.get(namespace).or_else(|| self.0.get("*")) else {
            let message = format!(
                "entry {:?} has `local: true`, which is not allowed in namespace {namespace}: write the mesh in {}, or \
                 start the controller with --hub-namespace {namespace}",
                local.name,
                self.0.keys().cloned().collect::<Vec<_>>().join(" or "),
            );
            return Some(("LocalNotAllowed", message));
        };
        let wide = mesh
            .clusters
            .iter()
            .find(|c| c.identity != ClusterIdentity::Local && c.profile < max);
        if let Some(wide) = wide {
            let message = format!(
                "entry {:?} is wider than --hub-namespace allows in namespace {namespace}: set its isolationProfile to {} or tighter",
                wide.name,
                match max {
                    Profile::ClusterMeshed => "cluster-meshed",
                    Profile::Sandbox => "sandbox",
                    Profile::Standard => "standard",
                },
            );
            return Some(("ProfileNotAllowed", message));
        }
        None
    }

    /// Says to the planner what the hub may be asked for from the namespace of this mesh.
    pub fn confine(&self, mesh: &mut Mesh) {
        let namespace = &mesh.id.namespace;
        if !self.confines(namespace) {
            return;
        }
        for entry in mesh
            .clusters
            .iter_mut()
            .filter(|entry| entry.identity == ClusterIdentity::Local)
        {
            entry.confined_to = Some(namespace.clone());
        }
    }

    /// Whether a mesh in this namespace gives away the hub's Services of that namespace alone, and others that allow it.
    fn confines(&self, namespace: &str) -> bool {
        let max = self.0.get(namespace).or_else(|| self.0.get("*"));
        max.is_some_and(|max| *max > Profile::ClusterMeshed)
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        mesh::{Cluster, MeshId},
        plan::tests::entry,
    };

    use super::*;

    fn mesh(namespace: &str, profile: Profile) -> Mesh {
        let entry = |name, identity, profile| Cluster {
            profile,
            ..entry(name, identity, &[])
        };
        let secret = ClusterIdentity::Secret {
            namespace: namespace.to_owned(),
            name: "s".to_owned(),
            key: "value".to_owned(),
            context: None,
        };
        Mesh {
            id: MeshId {
                namespace: namespace.to_owned(),
                name: "m".to_owned(),
            },
            created: 0,
            paused: false,
            deleting: false,
            adopt_hub: None,
            clusters: vec![
                entry("hub", ClusterIdentity::Local, Profile::ClusterMeshed),
                entry("member", secret, profile),
            ],
            accepted: BTreeMap::new(),
        }
    }

    fn word(flags: &[&str], namespace: &str, profile: Profile) -> Option<&'static str> {
        let flags: Vec<_> = flags.iter().map(|text| text.parse().expect("parses")).collect();
        HubNamespaces::new(&flags, "own")
            .refuses(&mesh(namespace, profile))
            .map(|(word, _)| word)
    }

    #[test]
    fn local_is_allowed_in_the_controllers_own_namespace_unless_the_flags_name_others() {
        assert_eq!(word(&[], "own", Profile::ClusterMeshed), None);
        assert_eq!(word(&[], "other", Profile::ClusterMeshed), Some("LocalNotAllowed"));
        assert_eq!(word(&["other"], "own", Profile::ClusterMeshed), Some("LocalNotAllowed"));
        assert_eq!(word(&["other", "own"], "own", Profile::ClusterMeshed), None);
        assert_eq!(word(&["*"], "any", Profile::ClusterMeshed), None);
    }

    #[test]
    fn a_namespace_with_a_bound_takes_no_wider_member() {
        assert_eq!(
            word(&["t=sandbox"], "t", Profile::ClusterMeshed),
            Some("ProfileNotAllowed")
        );
        assert_eq!(word(&["t=sandbox"], "t", Profile::Sandbox), None);
        assert_eq!(word(&["t=sandbox"], "t", Profile::Standard), None);
        assert_eq!(
            word(&["*", "t=standard"], "t", Profile::Sandbox),
            Some("ProfileNotAllowed")
        );
    }

    #[test]
    fn a_namespace_with_a_bound_is_confined_to_services_of_its_own() {
        let confined = |flags: &[&str], namespace: &str| {
            let flags: Vec<_> = flags.iter().map(|text| text.parse().expect("parses")).collect();
            HubNamespaces::new(&flags, "own").confines(namespace)
        };
        assert!(confined(&["t=sandbox"], "t") && confined(&["t=standard"], "t") && confined(&["*=sandbox"], "any"));
        assert!(!confined(&["t"], "t") && !confined(&[], "own") && !confined(&["*=sandbox", "t"], "t"));
    }

    #[test]
    fn a_flag_that_says_nothing_is_refused() {
        assert_eq!(
            "=sandbox".parse::<HubNamespace>(),
            Err(HubNamespaceError::NoNamespace("=sandbox".into()))
        );
        assert_eq!(
            "a=wide".parse::<HubNamespace>(),
            Err(HubNamespaceError::Profile("a=wide".into()))
        );
    }
}
