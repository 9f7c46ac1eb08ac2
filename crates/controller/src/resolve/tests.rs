use super::*;

fn set(texts: &[&str]) -> BTreeSet<IpAddr> {
    texts.iter().map(|text| text.parse().expect("an address")).collect()
}

fn member(name: &str) -> ClusterIdentity {
    ClusterIdentity::Secret {
        namespace: "ns".into(),
        name: name.into(),
        key: "value".into(),
        context: None,
    }
}

#[test]
fn a_name_with_several_addresses_keeps_the_one_in_use() {
    let (two, three) = ("192.0.2.2".parse().ok(), "192.0.2.3".parse().ok());
    assert_eq!(choose(None, Some(&set(&["192.0.2.3", "192.0.2.2"]))), two);
    assert_eq!(choose(three, Some(&set(&["192.0.2.3", "192.0.2.2"]))), three);
    assert_eq!(choose(three, Some(&set(&["192.0.2.2"]))), two);
}

#[test]
fn a_lookup_that_fails_changes_nothing() {
    let three = "192.0.2.3".parse().ok();
    assert_eq!(choose(three, None), three);
    assert_eq!(choose(three, Some(&set(&[]))), three);
    assert_eq!(choose(None, None), None);
}

/// Two hundred names that nobody answers, and one of another member that is added while they are asked for.
#[tokio::test(start_paused = true)]
async fn names_that_nobody_answers_starve_no_other_member() {
    let silent: BTreeSet<String> = (0..MAX_NAMES).map(|n| format!("silent-{n:03}.example")).collect();
    let mut wanted: Wanted = [(member("hostile"), silent.clone())].into();
    let (names, receiver) = watch::channel(wanted.clone());
    let (table, changed) = (Table::default(), Changed::default());
    let ask = |name: String| async move {
        if name.starts_with("silent") {
            tokio::time::sleep(LOOKUP).await;
            return None;
        }
        Some(set(&["192.0.2.7"]))
    };
    tokio::spawn(run(receiver, Arc::clone(&table), changed.clone(), ask));
    tokio::time::sleep(Duration::from_secs(1)).await;

    wanted.insert(member("honest"), ["node.example".to_owned()].into());
    let asked = Instant::now();
    names.send_replace(wanted);
    changed.notified().await;
    assert!(asked.elapsed() <= LOOKUP, "{:?}", asked.elapsed());
    let known: Vec<(String, IpAddr)> = table.lock().expect("sound").clone().into_iter().collect();
    assert_eq!(
        known,
        [("node.example".to_owned(), "192.0.2.7".parse().expect("an address"))]
    );
    assert_eq!(silent.len(), 200);

    // No name is wanted any more.
    names.send_replace(Wanted::new());
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(table.lock().expect("sound").is_empty());
}

#[test]
fn every_name_has_its_turn_and_comes_again_when_it_is_due() {
    let (mut turns, now) = (Turns::default(), Instant::now());
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let wanted: Wanted = [(member("a"), names(&["1", "2", "3"])), (member("b"), names(&["4"]))].into();
    turns.want(&wanted, now);
    let order: Vec<String> = std::iter::from_fn(|| turns.next(now)).map(|(_, name)| name).collect();
    assert_eq!(order, ["1", "4", "2", "3"]);
    // What is being asked for is not asked for twice, and what was dropped meanwhile does not come back.
    turns.want(&[(member("a"), names(&["1", "2"]))].into(), now);
    assert_eq!(turns.next(now), None);
    let later = now + REFRESH;
    for (of, name) in [("a", "3"), ("b", "4"), ("a", "1")] {
        turns.done(&member(of), name.to_owned(), later);
    }
    assert_eq!((turns.due(), turns.next(now)), (Some(later), None));
    assert_eq!(turns.next(later), Some((member("a"), "1".to_owned())));
    assert_eq!(turns.next(later), None);
}
