//! Tests agents whose clocks differ by two hours. WireGuard accepts a handshake initiation only if its timestamp is newer than the peer's
//! last one, and agents compare times in their cache and in annotations with their own clock.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use clustermesh_lab::{Running, wait_until};
use nix::sys::signal::Signal;

use crate::two_clusters::{MGMT, Site, TENANT, TIMEOUT, TwoClusters};

/// A library for LD_PRELOAD: it adds SKEW_SECONDS to the wall clock of a process.
const SKEW: &str = r#"
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = syscall(SYS_clock_gettime, clock, at);
    const char *skew = getenv("SKEW_SECONDS");
    if (result == 0 && skew && clock == CLOCK_REALTIME)
        at->tv_sec += atol(skew);
    return result;
}
"#;
const HOUR: i64 = 3600;

struct TestEnv<'a> {
    clusters: &'a TwoClusters,
    preload: &'a Path,
}

#[tokio::test]
async fn agents_with_wrong_clocks_connect_and_restart() {
    let clusters = TwoClusters::start().await;
    let directory = tempfile::tempdir().expect("a directory");
    let library = build(directory.path());
    let env = TestEnv {
        clusters: &clusters,
        preload: &library,
    };
    let (mgmt, tenant) = (clusters.site(MGMT), clusters.site(TENANT));

    let ahead = env.start(mgmt, "ahead", HOUR).await;
    let behind = env.start(tenant, "behind", -HOUR).await;
    clusters.write_all_peers().await;
    env.assert_reach_each_other().await;

    kill(behind).await;
    let _behind = env.start(tenant, "behind-2", -HOUR).await;
    env.assert_reach_each_other().await;
    kill(ahead).await;
    let ahead = env.start(mgmt, "ahead-2", HOUR).await;
    clusters.wait_until_reaches(mgmt, tenant).await;
    env.assert_reach_each_other().await;

    // The clock that was ahead is corrected. The tenant's node ignores initiations that are not newer than the last accepted one.
    // Handshakes that the tenant's node initiates still work.
    kill(ahead).await;
    let old_initiations = env.replayed(tenant).await;
    let _corrected = env.start(mgmt, "corrected", 0).await;
    wait_until("an ignored initiation", TIMEOUT, async || {
        let _ = clusters.pings(mgmt, tenant).await;
        let found = env.replayed(tenant).await;
        if found > old_initiations {
            Ok(())
        } else {
            Err(format!("{found} ignored packets"))
        }
    })
    .await
    .expect("the corrected clock is behind the last timestamp");
    clusters.wait_until_reaches(tenant, mgmt).await;
    clusters.wait_until_reaches(mgmt, tenant).await;
}

fn build(directory: &Path) -> PathBuf {
    let (source, library) = (directory.join("skew.c"), directory.join("skew.so"));
    std::fs::write(&source, SKEW).expect("write the library's source");
    let status = Command::new("gcc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .status();
    assert!(status.expect("run gcc (is it installed?)").success(), "gcc failed");
    library
}

async fn kill(mut agent: Running) {
    agent.signal(Signal::SIGKILL).expect("kill");
    agent.wait_for_exit(TIMEOUT).await.expect("the agent exits");
}

impl TestEnv<'_> {
    /// Starts an agent whose clock is wrong by `skew` seconds, and waits until it is ready.
    async fn start(&self, site: &Site, log: &str, skew: i64) -> Running {
        let variables = [
            format!("LD_PRELOAD={}", self.preload.display()),
            format!("SKEW_SECONDS={skew}"),
        ];
        let agent = self
            .clusters
            .agent_with_env(site, log, &variables.each_ref().map(String::as_str));
        self.clusters.wait_until_ready(site).await;
        let started = self.metric(site, "wg_agent_start_time_seconds").await;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a clock")
            .as_secs_f64();
        #[expect(clippy::cast_precision_loss)]
        let age = now + skew as f64 - started; // by the agent's clock
        assert!(
            (-60.0..600.0).contains(&age),
            "the agent's clock is not wrong: {started}, {now}"
        );
        agent
    }

    async fn assert_reach_each_other(&self) {
        let [mgmt, tenant] = &self.clusters.sites;
        self.clusters.wait_until_reaches(tenant, mgmt).await;
        self.clusters.wait_until_reaches(mgmt, tenant).await;
    }

    /// The packets that the device ignored because they were not newer than earlier ones.
    async fn replayed(&self, site: &Site) -> f64 {
        self.metric(site, "wg_agent_device_drops_total{reason=\"replayed\"}")
            .await
    }

    /// The value of a metric; 0 if the page of metrics lacks it.
    async fn metric(&self, site: &Site, name: &str) -> f64 {
        let (_, page) = self.clusters.page(site, "/metrics").await;
        assert!(page.contains("wg_agent_start_time_seconds"), "{page}");
        let value = page
            .lines()
            .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        value.unwrap_or_default()
    }
}
