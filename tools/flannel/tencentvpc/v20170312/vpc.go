// Package v20170312 replaces the SDK of Tencent's cloud, which the Go module proxy that we use does not serve. It has the names that
// flannel's backend for that cloud needs to compile, and every call fails. The lab uses the backend vxlan.
package v20170312

import "errors"

var errNotBuilt = errors.New("the lab's flanneld has no backend tencent-vpc")

type Client struct{}

type Filter struct {
	Name   *string
	Values []*string
}

type Route struct {
	DestinationCidrBlock, GatewayType, GatewayId, RouteType *string
	RouteId                                                 *uint64
	Enabled                                                 *bool
}

type RouteTable struct {
	RouteTableId *string
	RouteSet     []*Route
}

type DescribeRouteTablesRequest struct{ Filters []*Filter }

type DescribeRouteTablesResponse struct {
	Response *struct{ RouteTableSet []*RouteTable }
}

type ChangeRoutesRequest struct {
	RouteTableId *string
	Routes       []*Route
}

func NewClientWithSecretId(_, _, _ string) (*Client, error) { return &Client{}, errNotBuilt }
func NewDescribeRouteTablesRequest() *DescribeRouteTablesRequest {
	return &DescribeRouteTablesRequest{}
}
func NewCreateRoutesRequest() *ChangeRoutesRequest { return &ChangeRoutesRequest{} }
func NewDeleteRoutesRequest() *ChangeRoutesRequest { return &ChangeRoutesRequest{} }

func (*Client) DescribeRouteTables(*DescribeRouteTablesRequest) (*DescribeRouteTablesResponse, error) {
	return nil, errNotBuilt
}

func (*Client) CreateRoutes(*ChangeRoutesRequest) (any, error) { return nil, errNotBuilt }
func (*Client) DeleteRoutes(*ChangeRoutesRequest) (any, error) { return nil, errNotBuilt }
