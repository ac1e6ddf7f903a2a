#!/usr/bin/env bash
# What one GPU would decide, in the order of what it is worth, in parts of at most eight minutes of an
# H100 with 8 workers (estimated from the times of preset wide):
#   1 Table 4, its missing rates and seeds   4 BART for longer, R2C2 at equal mapped rates
#   2 the headline, standard against muP     5 Table 4 after 3,200 steps
#   3 Figures 2 and 3
#   bash scripts/gpu_blocks.sh [1 2 ...] [OPTION ...]   # OPTION: of `python -m sweeps run`, such as --dry-run
# A second call goes on where the first one was stopped. Grids start around the shipped tables, which are
# put where sweeps look for them unless there are some. `benchmarks/gpu.sh` takes single files and presets.
set -euo pipefail
. "$(dirname "$0")/experiment.sh"

only=" "
while [[ "${1-}" =~ ^[1-5]$ ]]; do only+="$1 " && shift; done
check_options "$@"

table() { # RESULT SHIPPED
  [ -e "results/$1" ] || { mkdir -p "$(dirname "results/$1")" && cp "plots/data/$2" "results/$1"; }
}
table nanolm_c4/figure_12_adam_laptop/results.csv everett/figure_12_adam.csv
table nanolm_c4/figure_12_adam_wide/results.csv everett/figure_12_adam_wide.csv
table nanolm_c4/figure_3_param_scaling_laptop/results.csv everett/figure_3_param_scaling.csv
table nanolm_c4/constants_desktop/constants.yaml everett/constants_desktop.yaml
table nanolm_c4/constants_embedding_1_desktop/constants.yaml everett/constants_embedding_1_desktop.yaml
table bart_span_denoise/figure_3_4_wide/results.csv dinan/figure_3_4_wide.csv

# Preset desktop_800 searches for constants with small models, on a CPU in 1.2 hours of one core each.
while read -r block words; do
  [[ "$only" == " " || "$only" == *" $block "* ]] || continue
  echo "block $block: $words" >&2
  python -m sweeps run $words --workers 8 "$@" </dev/null
done <<'BLOCKS'
1 nanolm_c4/sweeps/figure_12_adam.yaml --preset wide_five --curves standard_fixed ntk_fixed
1 nanolm_c4/sweeps/figure_12_adam.yaml --preset wide_five --curves mup_fixed mean_field_fixed
2 nanolm_c4/sweeps/embedding_1.yaml --preset wide
2 nanolm_c4/sweeps/figure_2_adam.yaml --preset headline
2 nanolm_c4/sweeps/constants_embedding_1.yaml --preset desktop_800
2 nanolm_c4/sweeps/constants.yaml --preset desktop_800
2 nanolm_c4/sweeps/embedding_1.yaml --preset wide_800 --where model.width<=512
2 nanolm_c4/sweeps/embedding_1.yaml --preset wide_800
2 nanolm_c4/sweeps/figure_2_adam.yaml --preset headline_800 --where model.width<=512
2 nanolm_c4/sweeps/figure_2_adam.yaml --preset headline_800
3 nanolm_c4/sweeps/figure_2_adam.yaml --preset wide_all --curves global full
3 nanolm_c4/sweeps/figure_2_adam.yaml --preset wide_all --curves full_constants none_constants
3 nanolm_c4/sweeps/figure_3_param_scaling.yaml --preset wide --curves global full
3 nanolm_c4/sweeps/figure_3_param_scaling.yaml --preset wide --curves full_constants none_constants
4 bart_span_denoise/sweeps/figure_3_4.yaml --preset longer_wide --where model.width<=256
4 bart_span_denoise/sweeps/figure_3_4.yaml --preset longer_wide
4 bart_span_denoise/sweeps/figure_5.yaml --preset mapped
5 nanolm_c4/sweeps/length.yaml --preset wide --where prescription.parameterization=mup
5 nanolm_c4/sweeps/length.yaml --preset wide --where prescription.parameterization=standard
5 nanolm_c4/sweeps/length.yaml --preset wide --where prescription.parameterization=ntk
5 nanolm_c4/sweeps/length.yaml --preset wide --where prescription.parameterization=mean_field
BLOCKS
