// Command meander-advantage closes groups of rewards and computes their advantages. See --help.
package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/meander-rl/meander/services/advantage"
	"github.com/meander-rl/meander/services/internal/boot"
)

func main() {
	defaults := advantage.DefaultConfig()
	defaults.Metrics = prometheus.DefaultRegisterer // what the health endpoint shows
	boot.Main(boot.Service[advantage.Config]{
		Name:       "advantage",
		Summary:    advantage.Summary,
		Default:    defaults,
		HealthAddr: "127.0.0.1:8084",
		Examples: []string{
			"meander-advantage",
			"meander-advantage --drain-timeout 1m --log-format json",
			"meander-advantage --print-config > advantage.yaml",
		},
		Run: advantage.Run,
	})
}
