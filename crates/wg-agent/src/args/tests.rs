use super::*;

fn config(line: &str) -> Result<Config, ArgsError> {
    let words = ["wg-agent"].into_iter().chain(line.split_whitespace());
    Cli::try_parse_from(words)
        .expect("flags that clap accepts")
        .flags
        .into_config()
}

/// The flags that full mode requires.
const FULL_MODE: &str = "--node-name a --wireguard-cidr 100.66.0.0/16";

#[test]
fn missing_required_flag_is_an_error() {
    let cases = [
        ("--wireguard-cidr 100.66.0.0/16 --node-name=", ArgsError::NoNodeName),
        ("--node-name a", ArgsError::NoRange),
    ];
    for (line, want) in cases {
        assert_eq!(config(line).map(|_| ()), Err(want), "{line}");
    }
}

#[test]
fn policy_mode_needs_a_node_name_and_ignores_full_mode_flags() {
    let policy = |line: &str| {
        let words = ["wg-agent"].into_iter().chain(line.split_whitespace());
        let flags = Cli::try_parse_from(words).expect("flags that clap accepts").flags;
        assert_eq!(flags.mode(), ModeFlag::Policy);
        flags.into_policy_config().map(|config| config.node_name)
    };
    assert_eq!(policy("--mode policy --node-name="), Err(ArgsError::NoNodeName));
    assert_eq!(policy("--mode policy --node-name a"), Ok("a".to_owned()));
    assert_eq!(
        policy(&format!("{FULL_MODE} --mode policy --mtu 1400")),
        Ok("a".to_owned())
    );
}

#[test]
fn range_without_usable_addresses_is_refused() {
    let error = config("--node-name a --wireguard-cidr 100.66.0.0/31")
        .map(|_| ())
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "--wireguard-cidr: 100.66.0.0/31 has no room for nodes: its first and last address are not used; \
         take a larger range, such as a /16"
    );
}

#[test]
fn cache_file_is_next_to_the_key_file_by_default() {
    let cache_file = |line: &str| config(&format!("{FULL_MODE} {line}")).unwrap().cache_file;
    assert_eq!(cache_file(""), Path::new("/var/lib/kilo/wg-agent.cache"));
    assert_eq!(
        cache_file("--key-file /etc/wg/key"),
        Path::new("/etc/wg/wg-agent.cache")
    );
    assert_eq!(
        cache_file("--key-file /etc/wg/key --cache-file /run/c"),
        Path::new("/run/c")
    );
}

/// The values of a key of the systemd unit, in order.
fn unit_values(key: &str) -> Vec<&'static str> {
    let unit = include_str!("../../../../deploy/systemd/wg-agent.service");
    let lines = unit.lines().filter_map(|line| line.split_once('='));
    lines.filter(|(k, _)| *k == key).map(|(_, value)| value).collect()
}

#[test]
fn systemd_unit_has_valid_flags_and_minimal_privileges() {
    let example = include_str!("../../../../deploy/systemd/wg-agent.env");
    let lines = || example.lines().filter_map(|line| line.split_once('='));
    let variables: Vec<_> = lines().filter(|(key, _)| !key.starts_with('#')).collect();
    assert_eq!(
        variables.iter().map(|(key, _)| *key).collect::<Vec<_>>(),
        ["NODE_NAME", "KUBECONFIG", "WIREGUARD_CIDR", "OPTIONS"]
    );
    let (_, options) = example.split_once("for example: OPTIONS=").unwrap();
    let options = options.lines().next().unwrap();
    let [start] = unit_values("ExecStart")[..] else {
        panic!("one ExecStart")
    };
    let start = start.replace("$OPTIONS", options);
    let start = variables
        .iter()
        .fold(start, |line, (key, value)| line.replace(&format!("${{{key}}}"), value));
    let cli = Cli::try_parse_from(start.split_whitespace()).expect("flags that exist");
    assert!(cli.command.is_none());
    let config = cli.flags.into_config().expect("a complete configuration");
    assert_eq!((config.node_name.as_str(), config.mtu), ("node-1", Mtu::Fixed(1380)));
    assert_eq!(
        config.kubeconfig.as_deref(),
        Some(Path::new("/etc/clustermesh/kubeconfig"))
    );
    let state = format!("/var/lib/{}", unit_values("StateDirectory")[0]);
    assert_eq!(
        [config.key_file.parent(), config.cache_file.parent()],
        [Some(Path::new(&state)); 2]
    );
    let [before] = unit_values("ExecStartPre")[..] else {
        panic!("one ExecStartPre")
    };
    let before = before.strip_prefix('+').expect("full privileges");
    let cli = Cli::try_parse_from(before.split_whitespace()).expect("a command that exists");
    assert!(matches!(
        cli.command,
        Some(Command::Prepare(PrepareArgs { conntrack_min: 262_144 }))
    ));

    assert_eq!(
        unit_values("ExecStopPost"),
        [""; 0],
        "a stopped agent keeps its firewall table"
    );
    for (key, value) in [
        ("CapabilityBoundingSet", "CAP_NET_ADMIN"),
        ("AmbientCapabilities", ""),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("DevicePolicy", "closed"),
        ("DeviceAllow", "/dev/net/tun rw"),
        ("SystemCallFilter", "@system-service"),
    ] {
        assert_eq!(unit_values(key), [value], "{key}");
    }
}

#[test]
fn cache_max_age_is_a_day_by_default_and_never_negative() {
    let age = |line: &str| config(&format!("{FULL_MODE} {line}")).unwrap().cache_max_age;
    assert_eq!(age(""), Duration::from_secs(24 * 3600));
    assert_eq!(age("--cache-max-age=1h30m"), Duration::from_secs(5400));
    assert_eq!(age("--cache-max-age=0s"), Duration::ZERO);
    for text in ["-1h", "24", "soon", ""] {
        let error = parse_duration(text).unwrap_err();
        assert!(error.contains("as 24h, 90m or 30s"), "{text}: {error}");
    }
    let negative = parse_duration("-1s").unwrap_err();
    assert_eq!(
        negative,
        "it must not be negative; write hours, minutes or seconds, such as 24h, 90m or 30s"
    );
}

#[test]
fn bypass_networks_lose_their_host_bits() {
    let config = config(&format!(
        "{FULL_MODE} --bypass-cidr 10.1.2.3/8 --bypass-cidr fd00::1/64"
    ))
    .unwrap();
    assert_eq!(
        config.bypass,
        ["10.0.0.0/8", "fd00::/64"].map(|n| n.parse::<IpNet>().unwrap())
    );
}

#[test]
fn mtu_is_auto_or_at_least_the_ipv6_minimum() {
    assert_eq!("auto".parse(), Ok(Mtu::Auto));
    assert_eq!("1280".parse(), Ok(Mtu::Fixed(1280)));
    for text in ["1279", "65536", "-1", "", "Auto"] {
        assert!(text.parse::<Mtu>().is_err(), "{text}");
    }
}

fn gateway(line: &str) -> Result<GatewayConfig, ArgsError> {
    let words = ["wg-agent", "--mode=gateway"]
        .into_iter()
        .chain(line.split_whitespace());
    let cli = Cli::try_parse_from(words).expect("flags that clap accepts");
    cli.flags.into_gateway_config()
}

const GATEWAY: &str = "--pod-name g-1 --pod-namespace ns --pod-ips 10.1.0.9,fd00::9 --gateway-cidr 100.66.255.0/28,fd66::/64 \
                       --endpoint-network 10.1.0.0/16,fd00::/16";

#[test]
fn gateway_has_the_address_of_its_ordinal_in_each_family() {
    let config = gateway(GATEWAY).unwrap();
    let addresses = ["100.66.255.2", "fd66::2"].map(|text| text.parse().unwrap());
    assert_eq!(config.addresses, addresses.into());
    assert_eq!(
        (config.gateway.to_string(), config.pod_ips.len()),
        ("ns/g-1".to_owned(), 2)
    );
    assert_eq!(config.endpoint_networks.len(), 2);
    let first = gateway(&GATEWAY.replace("g-1", "clustermesh-gateway-0")).unwrap();
    let addresses = ["100.66.255.1", "fd66::1"].map(|text| text.parse().unwrap());
    assert_eq!(first.addresses, addresses.into());
}

#[test]
fn missing_and_wrong_gateway_flags_are_named() {
    let without = |part: &str| gateway(&GATEWAY.replace(part, "")).unwrap_err().to_string();
    let cases = [
        ("--pod-name g-1", "--pod-name and --pod-namespace are not set"),
        ("--pod-namespace ns", "--pod-name and --pod-namespace are not set"),
        ("--pod-ips 10.1.0.9,fd00::9", "--pod-ips is not set"),
        ("--gateway-cidr 100.66.255.0/28,fd66::/64", "--gateway-cidr is not set"),
        (
            "--endpoint-network 10.1.0.0/16,fd00::/16",
            "--endpoint-network is not set",
        ),
    ];
    for (part, expected) in cases {
        let error = without(part);
        assert!(error.starts_with(expected), "{part}: {error}");
    }
    let wrong = |from: &str, to: &str| gateway(&GATEWAY.replace(from, to)).unwrap_err().to_string();
    let cases = [
        ("g-1", "gateway", "\"gateway\" does not end in a number"),
        ("g-1", "g-14", "100.66.255.0/28 has no address for ordinal 14"),
        ("fd66::/64", "100.67.0.0/28", "more than once for one address family"),
    ];
    for (from, to, expected) in cases {
        let error = wrong(from, to);
        assert!(error.contains(expected), "{to}: {error}");
    }
}
