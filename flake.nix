# Shells with the tools around Python at pinned versions. Python packages are not here: locks/ pins those, in and out of Nix.
# Only `builtins`, so that nix/stub can stand in for nixpkgs and tests/test_nix.py can evaluate every output with no network.
{
  description = "Orrery: shells with pinned tools";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";

  outputs =
    { nixpkgs, ... }:
    let
      systems = [
        "x86_64-linux"
        "aarch64-linux"
      ];
      forEachSystem =
        outputOf:
        builtins.listToAttrs (
          map (system: {
            name = system;
            value = outputOf nixpkgs.legacyPackages.${system};
          }) systems
        );

      # "3.11\n" names the attribute python311: the version is written once, in the file that uv reads too.
      pythonName = "python" + builtins.replaceStrings [ "." "\n" ] [ "" "" ] (builtins.readFile ./.python-version);

      shellWith =
        pkgs: cluster:
        let
          python = pkgs.${pythonName};
          # Wheels expect these from the system, and a Python of Nix does not look there.
          libraries = builtins.concatStringsSep ":" (
            map (package: "${package}/lib") [
              pkgs.stdenv.cc.cc.lib
              pkgs.numactl
              pkgs.zlib
            ]
          );
        in
        pkgs.mkShell {
          packages = [
            python
            pkgs.uv
            pkgs.go-jsonnet
            pkgs.git
            pkgs.gnumake
          ]
          ++ (if cluster then [ pkgs.apptainer ] else [ ]);
          env = {
            UV_PYTHON = python.interpreter;
            UV_PYTHON_DOWNLOADS = "never";
            UV_PYTHON_PREFERENCE = "only-system";
          };
          # Slurm's commands come last on PATH: a login node's own are of the version that its controller speaks.
          shellHook = ''
            export LD_LIBRARY_PATH="${libraries}''${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
          ''
          + (if cluster then "export PATH=\"$PATH:${pkgs.slurm}/bin\"\n" else "");
        };
    in
    {
      devShells = forEachSystem (pkgs: {
        default = shellWith pkgs true;
        light = shellWith pkgs false;
      });
      formatter = forEachSystem (pkgs: pkgs.nixfmt);
    };
}
