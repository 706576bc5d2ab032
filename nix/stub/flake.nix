# Stands in for nixpkgs where tests evaluate the flake without a network: the names that the flake uses and no others,
# so a misspelt or new name is an error there. Every program is a script that prints its own name.
# It cannot tell whether nixpkgs has a name (look it up when you add one here), nor whether a tool builds.
{
  description = "The part of nixpkgs that Orrery's flake uses, as empty programs";

  outputs =
    { ... }:
    let
      commandsOf = {
        apptainer = [ "apptainer" ];
        git = [ "git" ];
        gnumake = [ "make" ];
        go-jsonnet = [
          "jsonnet"
          "jsonnetfmt"
        ];
        nixfmt = [ "nixfmt" ];
        numactl = [ ];
        python311 = [ "python3.11" ];
        python312 = [ "python3.12" ];
        slurm = [
          "sbatch"
          "srun"
        ];
        uv = [ "uv" ];
        zlib = [ ];
      };

      # Bash is the machine's. The last word is `:` because Nix kills a builder that closes its output before it ends,
      # as a program does that bash runs in its own place.
      build =
        system: name: variables: script:
        derivation (
          variables
          // {
            inherit name system;
            builder = "/bin/bash";
            args = [
              "-c"
              "PATH=/usr/bin:/bin; ${script}; :"
            ];
          }
        );

      package =
        system: name: commands:
        let
          built = build system name { inherit commands; } ''
            mkdir -p $out/bin $out/lib
            for command in $commands; do
              printf '#!/bin/sh\necho stub %s\n' $command > $out/bin/$command
              chmod +x $out/bin/$command
            done'';
        in
        built // { interpreter = "${built}/bin/${builtins.concatStringsSep "" commands}"; };

      # The real one's arguments that the flake uses; any other is an error.
      mkShell =
        system:
        {
          packages,
          env,
          shellHook,
        }:
        build system "shell" (
          env
          // {
            inherit shellHook;
            PATH = builtins.concatStringsSep ":" (map (one: "${one}/bin") packages);
            outputs = [ "out" ];
          }
        ) "mkdir $out";
    in
    {
      legacyPackages = builtins.listToAttrs (
        map
          (system: {
            name = system;
            value = builtins.mapAttrs (package system) commandsOf // {
              mkShell = mkShell system;
              # `nix develop` runs this one.
              bashInteractive = build system "bash" { } "mkdir -p $out/bin; ln -s /bin/bash $out/bin/bash";
              stdenv.cc.cc.lib = package system "gcc-lib" [ ];
            };
          })
          [
            "x86_64-linux"
            "aarch64-linux"
          ]
      );
    };
}
