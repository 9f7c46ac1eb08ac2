use clustermesh_agent_core::{
    firewall::{Frame, Plan, Scope, desired, render},
    policy::{Policy, Rule},
};

use super::*;

fn table(mesh: &str) -> Firewall {
    let nets = [mesh.parse().unwrap()].into();
    let allow = vec![Rule {
        to: ["10.1.0.0/16".parse().unwrap()].into(),
        ports: [].into(),
    }];
    let policies = [Policy {
        name: "p".to_owned(),
        sources: [mesh.parse().unwrap()].into(),
        allow,
        ..Policy::default()
    }];
    desired(&Plan {
        frame: Frame {
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
        policies: &policies,
        internal_ips: &[].into(),
        api_servers: &[].into(),
        nodes: &[].into(),
        pods_elsewhere: &[].into(),
    })
}

#[tokio::test]
async fn the_first_pass_writes_the_table_and_the_second_nothing() {
    let mut keeper = Keeper::new(Memory::default());
    let wanted = table("10.2.0.0/16");
    let whole = Update::Whole {
        script: render(&wanted),
    };
    assert_eq!(keeper.converge(&wanted).await.unwrap(), Some(whole));
    assert_eq!(keeper.converge(&wanted).await.unwrap(), None);
    assert!(keeper.intact().await.unwrap());
}

#[tokio::test]
async fn a_change_of_policy_touches_elements_only() {
    let mut keeper = Keeper::new(Memory::default());
    keeper.converge(&table("10.2.0.0/16")).await.unwrap();
    let step = keeper.converge(&table("10.3.0.0/16")).await.unwrap();
    assert!(
        matches!(
            step,
            Some(Update::Elements {
                removed: 2,
                added: 2,
                ..
            })
        ),
        "{step:?}"
    );
}

#[tokio::test]
async fn a_table_that_another_hand_changed_or_took_is_written_whole() {
    let mut keeper = Keeper::new(Memory::default());
    let wanted = table("10.2.0.0/16");
    let whole = Some(Update::Whole {
        script: render(&wanted),
    });
    keeper.converge(&wanted).await.unwrap();
    keeper.backend().scripts.clear();
    assert!(!keeper.intact().await.unwrap());
    assert_eq!(keeper.converge(&wanted).await.unwrap(), whole);
    keeper
        .backend()
        .scripts
        .push("flush chain inet clustermesh from_mesh".to_owned());
    assert_eq!(keeper.converge(&wanted).await.unwrap(), whole);
}

#[tokio::test]
async fn elements_that_the_kernel_refuses_are_written_with_the_whole_table() {
    let mut keeper = Keeper::new(Memory::default());
    keeper.converge(&table("10.2.0.0/16")).await.unwrap();
    keeper.backend().refuse.push("delete element".to_owned());
    let step = keeper.converge(&table("10.3.0.0/16")).await.unwrap();
    assert_eq!(
        step,
        Some(Update::Whole {
            script: render(&table("10.3.0.0/16"))
        })
    );
}

#[tokio::test]
async fn a_refused_table_is_an_error_and_is_tried_again() {
    let mut keeper = Keeper::new(Memory {
        refuse: vec!["table".to_owned()],
        ..Memory::default()
    });
    assert!(keeper.converge(&table("10.2.0.0/16")).await.is_err());
    keeper.backend().refuse.clear();
    assert!(matches!(
        keeper.converge(&table("10.2.0.0/16")).await,
        Ok(Some(Update::Whole { .. }))
    ));
}

#[tokio::test]
async fn the_next_process_writes_nothing_where_the_table_stands_as_it_was_written() {
    let directory = tempfile::tempdir().unwrap();
    let stamp = || Stamp::beside(&directory.path().join("cache"));
    let wanted = table("10.2.0.0/16");
    let mut first = Keeper::new(Memory::default()).remembering(stamp());
    first.converge(&wanted).await.unwrap();
    let there = first.backend().clone();
    let start = async |there: &Memory, wanted: &Firewall| {
        let mut keeper = Keeper::new(there.clone()).remembering(stamp());
        let first = keeper.converge(wanted).await.unwrap();
        (first.is_some(), keeper.converge(wanted).await.unwrap().is_some())
    };
    assert_eq!(start(&there, &wanted).await, (false, false));
    let mut changed = there.clone();
    changed
        .scripts
        .push("flush chain inet clustermesh from_mesh".to_owned());
    assert_eq!(start(&changed, &wanted).await, (true, false), "another hand was at it");
    assert_eq!(
        start(&Memory::default(), &wanted).await,
        (true, false),
        "after a reboot"
    );
    assert_eq!(start(&there, &wanted).await, (false, false), "and written as before");
    assert_eq!(
        start(&there, &table("10.3.0.0/16")).await,
        (true, false),
        "other policies"
    );
    assert_eq!(start(&there, &wanted).await, (true, false), "written by the one before");
    stamp().remove().unwrap();
    stamp().remove().unwrap();
    assert_eq!(start(&there, &wanted).await, (true, false), "nothing is remembered");
}

#[tokio::test]
async fn nft_that_was_killed_is_said_to_lack_memory() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("nft");
    std::fs::write(&program, "#!/bin/sh\nkill -9 $$\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = Nft::new(program).run("").await.unwrap_err().to_string();
    assert_eq!(
        error,
        "nft was ended by signal 9; out of memory? Raise the memory limit of this container (resources.limits.memory)"
    );
}
