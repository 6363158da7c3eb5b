package instrument

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Fill makes the instruments of a struct: each exported field with a tag metric is one of that name, with the text of
// the tag help and, of a vector, the labels of the tag labels. Its type is prometheus.Counter, Gauge, Observer
// (_ratio: of shares; else of seconds), *CounterVec, *GaugeVec or *HistogramVec (of seconds). Structs in it are filled,
// too. It panics on any other type.
func (s Set) Fill(of any) {
	v := reflect.ValueOf(of).Elem()
	for i := range v.NumField() {
		f, tag := v.Field(i), v.Type().Field(i).Tag
		name, help, labels := tag.Get("metric"), tag.Get("help"), strings.Fields(tag.Get("labels"))
		if name == "" {
			if f.Kind() == reflect.Struct && v.Type().Field(i).IsExported() {
				s.Fill(f.Addr().Interface())
			}
			continue
		}
		switch to := f.Addr().Interface().(type) {
		case *prometheus.Counter:
			*to = s.Counter(name, help).WithLabelValues()
		case *prometheus.Gauge:
			*to = s.Gauge(name, help).WithLabelValues()
		case **prometheus.CounterVec:
			*to = s.Counter(name, help, labels...)
		case **prometheus.GaugeVec:
			*to = s.Gauge(name, help, labels...)
		case **prometheus.HistogramVec:
			*to = s.Seconds(name, help, labels...)
		case *prometheus.Observer:
			if strings.HasSuffix(name, "_ratio") {
				*to = s.Ratio(name, help).WithLabelValues()
			} else {
				*to = s.Seconds(name, help).WithLabelValues()
			}
		default:
			panic(fmt.Sprintf("instrument: %s: a %s", name, f.Type()))
		}
	}
}
