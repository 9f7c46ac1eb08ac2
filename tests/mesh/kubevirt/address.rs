//! Tests a worker that comes up with another address of the hub's pod network, as a virtual machine in a new pod does.

use std::{net::Ipv4Addr, time::Instant};

use clustermesh_lab::{AGENT_NAMESPACE, NAMESPACE, Product, wait_until};

use super::{HUB, MEMBER, PATIENCE, SIBLING, TestEnv, json, pod, siblings, url};
use crate::setup::as_v4;

/// The hub's pods and the other worker reach the worker with the new address, and no pod of the product on other nodes restarts.
pub(super) async fn worker_with_another_address_is_found(env: &mut TestEnv<'_>, product: &Product<'_>) {
    let others = running_containers(env).await;
    let before = env.sibling.address();
    let address = Ipv4Addr::from(u32::from(as_v4(before)) + 100);
    env.sibling.power_cut().await.unwrap();
    env.lab.set_worker_address(SIBLING, address).await.unwrap();
    env.sibling = env.lab.node(SIBLING);
    let on = Instant::now();
    env.sibling.power_on().await.unwrap();
    println!(
        "{SIBLING}: {before} -> {address}, Ready {:.1} s after power on",
        on.elapsed().as_secs_f64()
    );
    product.wait_until_ready().await.unwrap();
    env.serve_on(SIBLING).await;
    let hub_web = env.hub_webs[0].clone();
    env.webs = wait_until("an answer of the pod on the restarted worker", PATIENCE, async || {
        let webs = env.member.web_pods().await.map_err(|error| error.to_string())?;
        let web = webs.iter().find(|web| web.node == SIBLING).ok_or("it does not run")?;
        let answer = env.lab.http_get(&pod(&hub_web), &url(web.ip, 8080)).await;
        answer.map_err(|error| error.to_string())??;
        if webs.len() == 2 {
            Ok(webs)
        } else {
            Err(format!("{webs:?}"))
        }
    })
    .await
    .unwrap();
    println!(
        "hub -> pod on {SIBLING}: {:.1} s after power on",
        on.elapsed().as_secs_f64()
    );
    env.pods_reach_pods_with_own_address().await;
    siblings::workers_and_their_pods_reach_each_other(env).await;
    assert_eq!(running_containers(env).await, others);
}

/// Name and number of restarts of each pod of the product on the other nodes.
async fn running_containers(env: &TestEnv<'_>) -> Vec<String> {
    let mut found = vec![];
    for (cluster, namespace) in [(HUB, AGENT_NAMESPACE), (MEMBER, AGENT_NAMESPACE), (HUB, NAMESPACE)] {
        let pods = json(&env.lab.cluster(cluster), &["-n", namespace, "get", "pods"]).await;
        let pods = pods["items"].as_array().unwrap().clone();
        let others = pods.iter().filter(|pod| pod["spec"]["nodeName"] != SIBLING);
        found.extend(others.map(|pod| {
            let status = &pod["status"]["containerStatuses"][0];
            format!("{} {}", pod["metadata"]["name"], status["restartCount"])
        }));
    }
    found
}
