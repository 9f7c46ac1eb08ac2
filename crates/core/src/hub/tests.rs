use crate::{
    mesh::{Cluster, MeshId},
    plan::tests::entry,
};

use super::*;

fn secret(namespace: &str) -> ClusterIdentity {
    ClusterIdentity::Secret {
        namespace: namespace.to_owned(),
        name: "s".to_owned(),
        key: "value".to_owned(),
        context: None,
    }
}

/// A mesh with two entries: the cluster-meshed hub, with 10.1.0.0/16, and a member with `profile` and 100.80.1.0/24.
fn mesh(namespace: &str, profile: Profile) -> Mesh {
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
            entry("hub", ClusterIdentity::Local, &["10.1.0.0/16"]),
            Cluster {
                profile,
                ..entry("member", secret(namespace), &["100.80.1.0/24"])
            },
        ],
        accepted: BTreeMap::new(),
    }
}

fn without_local(namespace: &str, profile: Profile) -> Mesh {
    let mut mesh = mesh(namespace, profile);
    mesh.clusters.remove(0);
    mesh
}

fn with_allowed(mut mesh: Mesh, entry: usize, networks: &[&str]) -> Mesh {
    mesh.clusters[entry].allowed = networks.iter().map(|net| net.parse().unwrap()).collect();
    mesh
}

/// The rights for these values of `--hub-namespace`, with `--hub-network=10.1.0.0/16`. In the tests' names, a namespace (and each mesh in
/// it) is restricted if its flag limits profiles or networks.
fn hub(flags: &[&str]) -> HubNamespaces {
    rights(flags, &[], &["10.1.0.0/16"])
}

fn rights(hub_namespaces: &[&str], member_namespaces: &[&str], hub_networks: &[&str]) -> HubNamespaces {
    let hub_namespaces: Vec<_> = hub_namespaces.iter().map(|text| text.parse().unwrap()).collect();
    let member_namespaces: Vec<_> = member_namespaces.iter().map(|text| text.parse().unwrap()).collect();
    let hub_networks: Vec<_> = hub_networks.iter().map(|text| text.parse().unwrap()).collect();
    HubNamespaces::new(&hub_namespaces, &member_namespaces, &hub_networks, "own")
}

fn reason(hub: &HubNamespaces, mesh: &Mesh) -> Option<&'static str> {
    hub.find_refusal(mesh).map(|(reason, _)| reason)
}

fn message(hub: &HubNamespaces, mesh: &Mesh) -> String {
    hub.find_refusal(mesh).expect("refused").1
}

// threat: hub-rights-borrowed
#[test]
fn flags_allow_local_entry_and_default_is_own_namespace() {
    let refusal = |flags: &[&str], namespace| reason(&hub(flags), &mesh(namespace, Profile::ClusterMeshed));
    assert_eq!(refusal(&[], "own"), None);
    assert_eq!(refusal(&[], "other"), Some("LocalNotAllowed"));
    assert_eq!(refusal(&["other"], "own"), Some("LocalNotAllowed"));
    assert_eq!(refusal(&["other", "own"], "own"), None);
    assert_eq!(refusal(&["*"], "any"), None);
}

// threat: hub-rights-borrowed
#[test]
fn restricted_namespace_refuses_less_restrictive_profile() {
    let refusal = |flags: &[&str], profile| reason(&hub(flags), &mesh("t", profile));
    let sandbox = "t=sandbox,100.80.0.0/16";
    assert_eq!(refusal(&[sandbox], Profile::ClusterMeshed), Some("ProfileNotAllowed"));
    assert_eq!(refusal(&[sandbox], Profile::Sandbox), None);
    assert_eq!(refusal(&[sandbox], Profile::Standard), None);
    let standard = "t=standard,100.80.0.0/16";
    assert_eq!(refusal(&["*", standard], Profile::Sandbox), Some("ProfileNotAllowed"));
    // A namespace that two flags name has the more restrictive profile, and the networks of both.
    assert_eq!(
        refusal(&[standard, sandbox], Profile::Sandbox),
        Some("ProfileNotAllowed")
    );
    let both = hub(&["t=sandbox,100.81.0.0/16", sandbox]);
    assert_eq!(reason(&both, &mesh("t", Profile::Sandbox)), None);
}

// threat: unlisted-network
#[test]
fn restricted_mesh_outside_listed_networks_is_refused() {
    let member_nets = |networks: &[&str]| with_allowed(mesh("t", Profile::Sandbox), 1, networks);
    let hub_nets = |networks: &[&str]| with_allowed(mesh("t", Profile::Sandbox), 0, networks);
    let listed = hub(&["t=sandbox,100.80.0.0/16,fd00:80::/32"]);
    let refusal = |mesh: &Mesh| reason(&listed, mesh);
    assert_eq!(refusal(&member_nets(&["100.80.16.0/20", "fd00:80:1::/48"])), None);
    assert_eq!(
        refusal(&member_nets(&["100.80.16.0/20", "128.0.0.0/1"])),
        Some("NetworksNotAllowed")
    );
    // Only a part of each of these two networks is listed.
    assert_eq!(refusal(&member_nets(&["100.80.0.0/15"])), Some("NetworksNotAllowed"));
    assert_eq!(refusal(&member_nets(&["fd00::/16"])), Some("NetworksNotAllowed"));
    assert_eq!(refusal(&hub_nets(&["10.1.2.0/24"])), None);
    assert_eq!(
        refusal(&hub_nets(&["10.1.0.0/16", "10.2.0.0/16"])),
        Some("NetworksNotAllowed")
    );
    assert_eq!(refusal(&hub_nets(&["100.80.0.0/16"])), Some("NetworksNotAllowed"));

    assert_eq!(
        message(&listed, &member_nets(&["128.0.0.0/1"])),
        "allowedNetworks of entry \"member\" has 128.0.0.0/1, which lies outside those that are listed for it: 100.80.0.0/16, \
         fd00:80::/32. Meshes of namespace t use listed networks only: change the entry, or have the operator of the hub start \
         the controller with --hub-namespace=t=sandbox,CIDR,..."
    );
    assert_eq!(
        message(&hub(&["t=sandbox"]), &mesh("t", Profile::Sandbox)),
        "allowedNetworks of entry \"member\" has 100.80.1.0/24, and no network is listed for it. Meshes of namespace t use listed \
         networks only: change the entry, or have the operator of the hub start the controller with \
         --hub-namespace=t=sandbox,CIDR,..."
    );
    assert_eq!(
        message(
            &rights(&["t=sandbox,100.80.0.0/16"], &[], &[]),
            &mesh("t", Profile::Sandbox)
        ),
        "allowedNetworks of entry \"hub\" has 10.1.0.0/16, and no network is listed for it. Meshes of namespace t use listed \
         networks only: change the entry, or have the operator of the hub start the controller with --hub-network=CIDR,..."
    );
    // A list that is too wide by mistake does not allow members to use networks of the hub.
    let too_wide = hub(&["t=sandbox,0.0.0.0/0"]);
    assert_eq!(reason(&too_wide, &member_nets(&["100.80.16.0/20"])), None);
    let refusal_of_overlap = message(&too_wide, &member_nets(&["10.1.3.0/24"]));
    assert!(
        refusal_of_overlap.contains("which overlaps 10.1.0.0/16, a network of the hub (--hub-network)"),
        "{refusal_of_overlap}"
    );
    assert_eq!(
        reason(&too_wide, &member_nets(&["10.0.0.0/8"])),
        Some("NetworksNotAllowed")
    );
    // A list of networks applies with every profile. A namespace that allows cluster-meshed members and has no list may use
    // any network.
    let refusal_of_meshed = |flag: &str| {
        reason(
            &hub(&[flag]),
            &with_allowed(mesh("t", Profile::ClusterMeshed), 1, &["10.9.0.0/16"]),
        )
    };
    assert_eq!(refusal_of_meshed("t"), None);
    assert_eq!(refusal_of_meshed("t=cluster-meshed,10.9.0.0/16"), None);
    assert_eq!(
        refusal_of_meshed("t=cluster-meshed,10.8.0.0/16"),
        Some("NetworksNotAllowed")
    );
}

// threat: hub-closed-for-others
#[test]
fn restricted_mesh_cannot_close_the_hub_to_other_meshes() {
    let listed = hub(&["t=sandbox,100.80.0.0/16"]);
    for change in [
        |local: &mut Cluster| local.profile = Profile::Standard,
        |local: &mut Cluster| local.profile = Profile::Sandbox,
        |local: &mut Cluster| local.quarantine = true,
    ] {
        let mut closing = mesh("t", Profile::Sandbox);
        change(&mut closing.clusters[0]);
        assert_eq!(reason(&listed, &closing), Some("ProfileNotAllowed"));
        // Without flags, the namespace `own` is not restricted, so a mesh there may close the hub.
        closing.id.namespace = "own".into();
        assert_eq!(reason(&hub(&[]), &closing), None);
        // A refused mesh still takes part in the plan, but `reduce_to_allowed` resets the hub's entry in it.
        for hub in [&listed, &hub(&[])] {
            closing.id.namespace = "t".into();
            hub.reduce_to_allowed(&mut closing);
            let local = &closing.clusters[0];
            assert_eq!((local.profile, local.quarantine), (Profile::ClusterMeshed, false));
        }
    }
    // A mesh may quarantine its own members.
    let mut own = mesh("t", Profile::Sandbox);
    own.clusters[1].quarantine = true;
    assert_eq!(reason(&listed, &own), None);
}

// threat: mesh-without-local
#[test]
fn mesh_without_local_entry_obeys_namespace_rights() {
    let refusal = |hub: &HubNamespaces, namespace, profile| reason(hub, &without_local(namespace, profile));
    let default = hub(&[]);
    assert_eq!(refusal(&default, "own", Profile::ClusterMeshed), None);
    assert_eq!(
        refusal(&default, "other", Profile::ClusterMeshed),
        Some("NamespaceNotAllowed")
    );
    let sandboxes_only = hub(&["t=sandbox,100.80.0.0/16"]);
    assert_eq!(refusal(&sandboxes_only, "t", Profile::Sandbox), None);
    assert_eq!(
        refusal(&sandboxes_only, "t", Profile::ClusterMeshed),
        Some("ProfileNotAllowed")
    );
    let wide = with_allowed(without_local("t", Profile::Sandbox), 0, &["10.9.0.0/16"]);
    assert_eq!(reason(&sandboxes_only, &wide), Some("NetworksNotAllowed"));

    let members = rights(&[], &["t,100.80.0.0/16"], &["10.1.0.0/16"]);
    assert_eq!(refusal(&members, "t", Profile::ClusterMeshed), None);
    assert_eq!(
        reason(&members, &mesh("t", Profile::ClusterMeshed)),
        Some("LocalNotAllowed")
    );
    let wide = with_allowed(without_local("t", Profile::ClusterMeshed), 0, &["10.9.0.0/16"]);
    let why = message(&members, &wide);
    assert!(why.ends_with("--member-namespace=t,CIDR,..."), "{why}");
    // `--member-namespace` does not change the rights of the controller's own namespace.
    assert_eq!(refusal(&members, "own", Profile::ClusterMeshed), None);
    assert_eq!(reason(&members, &mesh("own", Profile::ClusterMeshed)), None);
}

// threat: unlisted-network
#[test]
fn unlisted_accepted_networks_of_restricted_mesh_are_dropped() {
    let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
    // `gone` is not an entry of the mesh, so its networks are dropped, too.
    let mut mesh = mesh("t", Profile::Sandbox);
    mesh.accepted = BTreeMap::from([
        ("hub".to_owned(), nets(&["10.1.0.0/16", "10.9.0.0/16"])),
        ("member".to_owned(), nets(&["100.80.1.0/24", "128.0.0.0/1"])),
        ("gone".to_owned(), nets(&["100.80.2.0/24"])),
    ]);
    let reduced = |flags: &[&str]| {
        let mut mesh = mesh.clone();
        hub(flags).reduce_to_allowed(&mut mesh);
        let confined_to = mesh.clusters[0].confined_to.clone();
        (confined_to, mesh.accepted)
    };
    let inside = BTreeMap::from([
        ("hub".to_owned(), nets(&["10.1.0.0/16"])),
        ("member".to_owned(), nets(&["100.80.1.0/24"])),
    ]);
    assert_eq!(
        reduced(&["t=sandbox,100.80.0.0/16"]),
        (Some("t".into()), inside.clone())
    );
    assert_eq!(reduced(&["t=cluster-meshed,100.80.0.0/16"]), (None, inside));
    assert_eq!(reduced(&["t"]), (None, mesh.accepted.clone()));
    // Without a flag for its namespace, the mesh may use no network.
    assert_eq!(reduced(&["other"]), (None, BTreeMap::new()));
}

// threat: grant-across-namespaces
#[test]
fn profile_limit_of_namespace_confines_its_meshes() {
    let confines = |flags: &[&str], namespace: &str| {
        let mut mesh = mesh(namespace, Profile::Sandbox);
        hub(flags).reduce_to_allowed(&mut mesh);
        let confined: Vec<Option<String>> = mesh.clusters.into_iter().map(|entry| entry.confined_to).collect();
        assert_eq!(confined[1], None);
        confined[0].is_some()
    };
    assert!(confines(&["t=sandbox"], "t") && confines(&["t=standard"], "t") && confines(&["*=sandbox"], "any"));
    assert!(!confines(&["t"], "t") && !confines(&[], "own") && !confines(&["*=sandbox", "t"], "t"));
}

#[test]
fn malformed_flag_is_refused_and_host_bits_are_cleared() {
    let hub_error = |text: &str| text.parse::<HubNamespace>().unwrap_err();
    assert_eq!(
        hub_error("=sandbox"),
        FlagError::MalformedHubNamespace("=sandbox".into())
    );
    assert_eq!(
        hub_error("a,10.0.0.0/8"),
        FlagError::MalformedHubNamespace("a,10.0.0.0/8".into())
    );
    assert_eq!(hub_error("a=wide"), FlagError::Profile("a=wide".into()));
    assert_eq!(hub_error("a=,10.0.0.0/8"), FlagError::Profile("a=,10.0.0.0/8".into()));
    assert_eq!(hub_error("a=sandbox,"), FlagError::Network(String::new()));
    assert_eq!(hub_error("a=sandbox,10.0.0.0"), FlagError::Network("10.0.0.0".into()));
    let member_error = |text: &str| text.parse::<MemberNamespace>().unwrap_err();
    assert_eq!(member_error("a"), FlagError::MalformedMemberNamespace("a".into()));
    assert_eq!(
        member_error(",10.0.0.0/8"),
        FlagError::MalformedMemberNamespace(",10.0.0.0/8".into())
    );
    assert_eq!(member_error("a,x"), FlagError::Network("x".into()));
    let network = "10.1.2.3/16".parse::<HubNetwork>().unwrap();
    assert_eq!(network, HubNetwork("10.1.0.0/16".parse().unwrap()));
}
