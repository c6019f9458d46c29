import sys,os; os.environ["SCAN"]="0"
import bench0 as B, jax
B.LAYERS=30
m=B.load(sys.argv[1],"o"); c,lo,co=B.build(m.paged_attention,32); print(lo,co)
