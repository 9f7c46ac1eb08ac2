//! Tests of the table manager in a network namespace of its own, with the kernel's nftables. They need root.

use std::{net::SocketAddr, os::unix::fs::PermissionsExt, process::Command, thread, time::Duration};

use clustermesh_agent_core::{
    gateway::{Balancer, Grant, RuleParameters, SandboxId},
    numbers::NFT_TABLE,
};
use clustermesh_core::mesh::{ObjectName, Protocol};
use nix::sched::{CloneFlags, unshare};

use super::*;

/// The limit of nft's address space: too small for 5,000 grants in one transaction, large enough for one step.
const ADDRESS_SPACE_KB: u32 = 40_000;
/// The number of grants with one endpoint that fit into one step: a step, which is one transaction, changes at most 10,000
/// elements, and each of these grants counts as 7.
const STEP_GRANTS: u16 = 1428;
const SANDBOX: SandboxId = SandboxId(7);

fn table(grants: u16) -> Table {
    let grant = |number: u16| {
        let endpoint: SocketAddr = format!("10.244.{}.{}:5432", number >> 8, number & 255).parse().unwrap();
        let grant = Grant {
            id: GrantId(u32::from(number) + 1),
            service: ObjectName {
                namespace: "team".to_owned(),
                name: "db".to_owned(),
            },
            balancer: Balancer {
                v4: vec![endpoint],
                ..Balancer::default()
            },
            allowed_endpoints: [endpoint].into(),
        };
        ((SANDBOX, Protocol::Tcp, 20000 + number), grant)
    };
    Table {
        parameters: RuleParameters {
            interface: "wg0".parse().unwrap(),
            listen_port: 51820,
            admin_port: 9587,
            addresses: ["100.66.255.1".parse().unwrap()].into(),
            sandbox_connections: None,
            endpoint_connections: None,
        },
        sandboxes: [("100.80.0.0/20".parse().unwrap(), SANDBOX)].into(),
        rates: [].into(),
        grants: (0..grants).map(grant).collect(),
    }
}

fn list(what: &[&str]) -> String {
    let output = Command::new("nft").arg("list").args(what).output().expect("run nft");
    String::from_utf8(output.stdout).expect("text")
}

/// Whether the table forwards packets of the tunnel: the set `alive` contains the tunnel's interface.
fn is_open() -> bool {
    list(&["set", "inet", NFT_TABLE, "alive"]).contains("\"wg0\" timeout")
}

/// The number of grants in the table. Each has one endpoint, and the chain for grants with one IPv4 endpoint is `choose4-1`.
fn count_grants() -> usize {
    list(&["map", "inet", NFT_TABLE, "services4"])
        .matches(" : goto choose4-1")
        .count()
}

/// Runs the test in a new network namespace, with a manager whose `nft` has little memory.
fn in_namespace(test: impl AsyncFnOnce(TableManager) + Send + 'static) {
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("nft");
    let text = format!("#!/bin/sh\nulimit -v {ADDRESS_SPACE_KB}\nexec nft \"$@\"\n");
    std::fs::write(&program, text).expect("write a program");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("make it executable");
    let run = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("this test makes a network namespace and needs root (CAP_SYS_ADMIN)");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let table_manager = TableManager {
            nft: Nft::new(program),
            ..TableManager::default()
        };
        runtime.expect("a runtime").block_on(test(table_manager));
    });
    if let Err(panic) = run.join() {
        std::panic::resume_unwind(panic);
    }
}

fn in_ten_minutes() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

/// Writes steps until the table is the desired one; returns their number.
async fn finish(table_manager: &mut TableManager, desired: &Table) -> usize {
    for step in 1..100 {
        if table_manager.converge(desired).await.expect("a step").finished {
            return step;
        }
    }
    panic!("not finished after 99 steps");
}

#[test]
fn large_table_is_opened_by_its_last_step() {
    in_namespace(async |mut table_manager| {
        let desired = table(3000);
        table_manager.renew(in_ten_minutes()).await.expect("a renewal");
        for grants in [STEP_GRANTS, 2 * STEP_GRANTS] {
            assert!(!table_manager.converge(&desired).await.expect("a step").finished);
            table_manager.renew(in_ten_minutes()).await.expect("a renewal");
            assert_eq!((count_grants(), is_open()), (grants.into(), false));
        }
        assert!(table_manager.converge(&desired).await.expect("a step").finished);
        assert_eq!((count_grants(), is_open()), (3000, true));
    });
}

#[test]
fn many_grants_at_once_fit_into_little_memory() {
    in_namespace(async |mut table_manager| {
        table_manager.renew(in_ten_minutes()).await.expect("a renewal");
        assert_eq!(finish(&mut table_manager, &table(1)).await, 1);
        assert_eq!(finish(&mut table_manager, &table(5000)).await, 4);
        // The table is still open.
        assert_eq!((count_grants(), is_open()), (5000, true));
        assert_eq!(finish(&mut table_manager, &table(1)).await, 4);
        assert_eq!((count_grants(), is_open()), (1, true));
    });
}

#[test]
fn table_that_shrinks_between_steps_is_opened() {
    in_namespace(async |mut table_manager| {
        table_manager.renew(in_ten_minutes()).await.expect("a renewal");
        assert!(
            !table_manager
                .converge(&table(STEP_GRANTS + 1))
                .await
                .expect("a step")
                .finished
        );
        assert_eq!(finish(&mut table_manager, &table(STEP_GRANTS)).await, 1);
        assert_eq!((count_grants(), is_open()), (STEP_GRANTS.into(), true));
    });
}

#[test]
fn table_deleted_between_steps_is_written_from_the_start() {
    in_namespace(async |mut table_manager| {
        let desired = table(3000);
        assert!(!table_manager.converge(&desired).await.expect("a step").finished);
        let deleted = Command::new("nft")
            .args(["delete", "table", "inet", NFT_TABLE])
            .status();
        assert!(deleted.expect("run nft").success() && !table_manager.is_current());
        assert_eq!(finish(&mut table_manager, &desired).await, 3);
        assert_eq!(count_grants(), 3000);
    });
}

#[test]
fn table_exists_once_any_manager_has_written_it() {
    in_namespace(async |mut table_manager| {
        let other = TableManager::default();
        assert!(!other.table_exists() && !table_manager.table_exists());
        finish(&mut table_manager, &table(1)).await;
        assert!(other.table_exists() && !other.has_written());
    });
}
