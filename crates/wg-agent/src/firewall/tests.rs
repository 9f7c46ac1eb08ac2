use clustermesh_agent_core::firewall::{Plan, RuleParameters, Scope, desired, render};
use clustermesh_core::observe::PolicySpec;

use super::*;

fn table(mesh: &str) -> Firewall {
    let nets = [mesh.parse().unwrap()].into();
    let policies = [PolicySpec {
        sources: [mesh.parse().unwrap()].into(),
        allow: ["10.1.0.0/16".parse().unwrap()].into(),
        ..PolicySpec::default()
    }];
    desired(&Plan {
        parameters: RuleParameters {
            scope: Scope::Tunnel,
            device: "kilo0".parse().unwrap(),
            listen_port: 51820,
            mtu: 1420,
            wireguard_v4: None,
            wireguard_v6: None,
        },
        mesh: &nets,
        throw: &[].into(),
        published: &[].into(),
        own_cluster: &[].into(),
        gateways: &[].into(),
        own_sources: &[].into(),
        own_pods: &[].into(),
        policies: &policies,
        internal_ips: &[].into(),
        api_servers: &[].into(),
        nodes: &[].into(),
        pod_cidrs_of_other_nodes: &[].into(),
    })
}

#[tokio::test]
async fn first_pass_writes_the_table_and_the_second_nothing() {
    let mut manager = FirewallManager::new(Memory::default());
    let wanted = table("10.2.0.0/16");
    let whole = Update::Whole {
        script: render(&wanted),
    };
    assert_eq!(manager.converge(&wanted).await.unwrap(), Some(whole));
    assert_eq!(manager.converge(&wanted).await.unwrap(), None);
    assert!(manager.matches_kernel().await.unwrap());
}

#[tokio::test]
async fn policy_change_writes_only_elements() {
    let mut manager = FirewallManager::new(Memory::default());
    manager.converge(&table("10.2.0.0/16")).await.unwrap();
    let step = manager.converge(&table("10.3.0.0/16")).await.unwrap();
    assert!(
        matches!(
            step,
            Some(Update::Elements {
                removed: 2, // one element each of `mesh4` and `allow4`
                added: 2,
                ..
            })
        ),
        "{step:?}"
    );
}

#[tokio::test]
async fn externally_changed_table_is_replaced() {
    let mut manager = FirewallManager::new(Memory::default());
    let wanted = table("10.2.0.0/16");
    let whole = Some(Update::Whole {
        script: render(&wanted),
    });
    manager.converge(&wanted).await.unwrap();
    manager.backend().scripts.clear();
    assert!(!manager.matches_kernel().await.unwrap());
    assert_eq!(manager.converge(&wanted).await.unwrap(), whole);
    manager
        .backend()
        .scripts
        .push("flush chain inet clustermesh from_mesh".to_owned());
    assert_eq!(manager.converge(&wanted).await.unwrap(), whole);
}

#[tokio::test]
async fn refused_element_update_replaces_the_table() {
    let mut manager = FirewallManager::new(Memory::default());
    manager.converge(&table("10.2.0.0/16")).await.unwrap();
    manager.backend().refuse.push("delete element".to_owned());
    let step = manager.converge(&table("10.3.0.0/16")).await.unwrap();
    assert_eq!(
        step,
        Some(Update::Whole {
            script: render(&table("10.3.0.0/16"))
        })
    );
}

#[tokio::test]
async fn refused_table_is_an_error_and_is_retried() {
    let mut manager = FirewallManager::new(Memory {
        refuse: vec!["table".to_owned()],
        ..Memory::default()
    });
    assert!(manager.converge(&table("10.2.0.0/16")).await.is_err());
    manager.backend().refuse.clear();
    assert!(matches!(
        manager.converge(&table("10.2.0.0/16")).await,
        Ok(Some(Update::Whole { .. }))
    ));
}

#[tokio::test]
async fn next_process_does_not_write_an_unchanged_table() {
    let directory = tempfile::tempdir().unwrap();
    let record = || TableRecord::next_to_cache(&directory.path().join("cache"));
    let wanted = table("10.2.0.0/16");
    let mut first = FirewallManager::new(Memory::default()).with_record(record());
    first.converge(&wanted).await.unwrap();
    let kernel = first.backend().clone();
    // Starts a process and runs two passes. Returns whether each pass wrote the table.
    let start = async |kernel: &Memory, wanted: &Firewall| {
        let mut manager = FirewallManager::new(kernel.clone()).with_record(record());
        let first = manager.converge(wanted).await.unwrap();
        (first.is_some(), manager.converge(wanted).await.unwrap().is_some())
    };
    assert_eq!(start(&kernel, &wanted).await, (false, false));
    let mut changed = kernel.clone();
    changed
        .scripts
        .push("flush chain inet clustermesh from_mesh".to_owned());
    assert_eq!(start(&changed, &wanted).await, (true, false), "changed externally");
    assert_eq!(
        start(&Memory::default(), &wanted).await,
        (true, false),
        "after a reboot"
    );
    assert_eq!(start(&kernel, &wanted).await, (false, false), "unchanged");
    assert_eq!(
        start(&kernel, &table("10.3.0.0/16")).await,
        (true, false),
        "other policies"
    );
    assert_eq!(
        start(&kernel, &wanted).await,
        (true, false),
        "the last process wrote other policies"
    );
    record().remove().unwrap();
    // Removing a missing record is no error.
    record().remove().unwrap();
    assert_eq!(start(&kernel, &wanted).await, (true, false), "no record");
}

#[tokio::test]
async fn killed_nft_is_reported_as_out_of_memory() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("nft");
    std::fs::write(&program, "#!/bin/sh\nkill -9 $$\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = Nft::new(program).run("").await.unwrap_err().to_string();
    assert_eq!(
        error,
        "nft was killed by signal 9; out of memory? Raise the memory limit of this container (resources.limits.memory)"
    );
}
