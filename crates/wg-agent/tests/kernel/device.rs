//! Runs the tests of `contract` with the userspace backend. Needs root.

use clustermesh_tests::{contract, netns};
use wg_agent::device::{self, Backend, Configuration, DeviceError};

macro_rules! case {
    ($($name:ident)*) => { $(
        #[test]
        fn $name() {
            contract::$name(Backend::Userspace);
        }
    )* };
}
clustermesh_tests::each_device_test!(case);

#[test]
fn auto_backend_follows_what_the_kernel_supports() {
    let ns = netns::NetNs::new("auto");
    let has = ns
        .output("ip", &["link", "add", "probe", "type", "wireguard"])
        .status
        .success();
    let configuration = Configuration {
        private_key: [1; 32].into(),
        listen_port: 51820,
        fwmark: 0,
        mtu: 1420,
    };
    let name = netns::unique_name("wa");
    let open = |backend| ns.enter(|| device::open(backend, &name, &configuration, Default::default()));
    let opened = open(Backend::Auto).expect("one of the two");
    let want = if has {
        ("kernel", "--backend=auto: this node's kernel has WireGuard")
    } else {
        (
            "userspace",
            "--backend=auto: this node's kernel has no WireGuard (EOPNOTSUPP)",
        )
    };
    assert_eq!((opened.device.backend(), opened.reason), want);
    opened.device.close().expect("close");
    if !has {
        let error = open(Backend::Kernel).map(drop).expect_err("there is none");
        assert!(matches!(error, DeviceError::NoKernelWireguard), "{error}");
        assert_eq!(contract::links(&ns), ["lo"]);
    }
}
