//! Tests labs without Kubernetes nodes: real API servers with etcd, and bare hosts on the underlay.

use std::collections::BTreeSet;
use std::path::Path;

use clustermesh_lab::{Lab, LabPlan, lab_home, running_labs};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use kube::api::{Api, ListParams, PostParams};

#[tokio::test]
async fn two_api_servers_are_separate_and_leave_nothing_behind() {
    let lab = Lab::start(LabPlan::control_planes(&["mgmt", "tenant-a"]))
        .await
        .unwrap();
    let directory = lab.directory().to_owned();
    let pid = std::fs::read_to_string(directory.join("supervisor.pid")).unwrap();
    assert!(running_labs().contains(&directory));

    let mut authorities = BTreeSet::new();
    for name in ["mgmt", "tenant-a"] {
        let cluster = lab.cluster(name);
        let client = cluster.client().await.unwrap();
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "default");
        let map = ConfigMap {
            metadata: kube::api::ObjectMeta {
                name: Some(name.into()),
                ..Default::default()
            },
            ..Default::default()
        };
        maps.create(&PostParams::default(), &map).await.unwrap();
        let namespaces: Api<Namespace> = Api::all(client);
        namespaces.get("kube-system").await.unwrap();
        authorities.insert(ca(&cluster.kubeconfig().unwrap()));

        let kubectl = cluster.kubectl(["get", "configmap", name, "-o", "name"]).await.unwrap();
        assert_eq!(kubectl.stdout, format!("configmap/{name}\n"));
    }
    assert_eq!(authorities.len(), 2, "each cluster has its own certificate authority");
    let client = lab.cluster("mgmt").client().await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(client, "default");
    let maps: Vec<_> = maps.list(&ListParams::default()).await.unwrap().items;
    assert!(
        maps.iter().all(|map| map.metadata.name.as_deref() != Some("tenant-a")),
        "one cluster contains an object of the other"
    );

    drop(lab);
    assert!(!directory.exists(), "the run directory still exists");
    assert!(
        !Path::new("/proc").join(pid.trim()).exists(),
        "the supervisor still runs"
    );
}

#[tokio::test]
async fn api_server_recovers_after_kill_and_after_freeze() {
    let lab = Lab::start(LabPlan::control_planes(&["mgmt"])).await.unwrap();
    let cluster = lab.cluster("mgmt");
    let before = cluster.kubeconfig().unwrap();
    cluster.kubectl(["create", "namespace", "kept"]).await.unwrap();
    cluster.kill_api().unwrap();
    // kubectl would retry for 50 s when the forwarded port closes the connection, so this request does not use kubectl.
    assert!(cluster.client().await.unwrap().apiserver_version().await.is_err());
    cluster.start_api().await.unwrap();
    assert_eq!(
        cluster
            .kubectl(["get", "namespace", "kept", "-o", "name"])
            .await
            .unwrap()
            .stdout,
        "namespace/kept\n"
    );
    assert_eq!(cluster.kubeconfig().unwrap(), before);

    cluster.freeze_api().unwrap();
    let response = cluster
        .try_kubectl(["get", "--raw", "/readyz", "--request-timeout=1s"])
        .await
        .unwrap();
    assert!(
        !response.status.success(),
        "a frozen API server answered: {}",
        response.stdout
    );
    cluster.thaw_api().unwrap();
    cluster.wait_for_api().await.unwrap();
}

#[tokio::test]
async fn panicking_test_keeps_logs_but_no_lab() {
    let lab = Lab::start(LabPlan::control_planes(&["mgmt"])).await.unwrap();
    let directory = lab.directory().to_owned();
    let hint = lab.access_hint();
    assert!(
        hint.contains(&format!("--kubeconfig {}/mgmt/admin.kubeconfig", directory.display())),
        "{hint}"
    );
    let test = std::thread::spawn(move || {
        let _lab = lab;
        panic!("deliberate panic, as in a failed test");
    });
    assert!(test.join().is_err());
    assert!(!directory.exists());
    let kept = lab_home().unwrap().join("failed").join(directory.file_name().unwrap());
    assert!(kept.join("mgmt-apiserver.log").metadata().unwrap().len() > 0);
    std::fs::remove_dir_all(kept).unwrap();
}

#[tokio::test]
async fn underlay_connects_hosts_but_forwards_nothing() {
    let lab = Lab::start(LabPlan::control_planes(&["mgmt"])).await.unwrap();
    let one = lab.add_host("one", "172.30.1.101".parse().unwrap()).await.unwrap();
    let two = lab.add_host("two", "172.30.1.102".parse().unwrap()).await.unwrap();
    let url = "https://172.30.1.1:6443/version";
    let answer = one.exec(["curl", "-sSk", "-m", "5", url]).await.unwrap();
    assert!(answer.stdout.contains("gitVersion"), "{}", answer.stdout);
    one.exec(["ping", "-c", "1", "-W", "2", "172.30.1.102"]).await.unwrap();

    one.cut_link().await.unwrap();
    assert!(
        !one.try_exec(["ping", "-c", "1", "-W", "1", "172.30.1.102"])
            .await
            .unwrap()
            .status
            .success()
    );
    one.restore_link().await.unwrap();
    one.exec(["ping", "-c", "1", "-W", "2", "172.30.1.102"]).await.unwrap();

    // The default gateway of "one" is the underlay's namespace. It has a route to 10.99.0.1 on "two", but must not forward packets.
    two.exec(["ip", "addr", "add", "10.99.0.1/32", "dev", "lo"])
        .await
        .unwrap();
    lab.underlay_exec(["ip", "route", "add", "10.99.0.0/16", "via", "172.30.1.102"])
        .await
        .unwrap();
    assert!(
        !one.try_exec(["ping", "-c", "1", "-W", "1", "10.99.0.1"])
            .await
            .unwrap()
            .status
            .success()
    );
}

fn ca(kubeconfig: &str) -> String {
    let line = kubeconfig
        .lines()
        .find(|line| line.contains("certificate-authority-data"))
        .unwrap();
    line.trim().to_owned()
}
